"""The help texts that teach the commands: examples, conventions and exit codes."""

from __future__ import annotations

_EXIT_CODES = """exit codes
  0  done, or stopped by a signal after a step of training
  1  a run failed, a verification does not hold, --require is not met, or a
     bug of splitc
  2  the input is wrong; nothing was started or written
  3  a run failed, and another start will do no better; or the input of a
     command with --require is wrong
  130  stopped by Ctrl-C
"""
_CONVENTIONS = """a model file offers
  model    a torch.nn.Module, or a function or class that gives one without
           arguments; net.py:other takes `other` instead
  loss     a function of (output, target), or a loss module; without it the
           model returns the loss
  example  one rank's batch of inputs: a tensor, a tuple of them, or a dict by
           the names of forward's arguments
  target   a tensor with a row for each example, or a tuple of them
example and target may be functions; where they take `batch`, they are called
with the batch that --input asks for.
"""
_EXAMPLES = {
    "": """examples:
  splitc example alexnet                               (writes alexnet.py here)
  splitc try examples/mlp.py
  splitc inspect examples/alexnet.py --world 4 --cluster v100-10gbe
  splitc compile examples/alexnet.py --world 4 --strategy layer_separation
  splitc run build --steps 3
  splitc verify examples/mlp.py --world 4
  splitc clusters
  splitc calibrate -o cluster.toml

splitc COMMAND --help shows more.
""",
    "try": """examples:
  splitc try examples/mlp.py
  splitc try examples/alexnet.py --world 4 --cluster rtx3090-1gbe
""",
    "inspect": """examples:
  splitc inspect examples/alexnet.py --world 11 --cluster v100-10gbe
  splitc inspect examples/vgg16.py --world 4           (measures this machine)
  splitc inspect examples/vgg16.py:vgg19 --world 8 --cluster my.toml
  splitc inspect examples/alexnet.py --world 4 --input 16x3x224x224
  splitc inspect examples/alexnet.py --world 4 --memory 8GB \\
      --strategy "layer_separation(n_c=3, n_f=1)" --pin 'classifier.*=fc'
  splitc inspect examples/alexnet.py --world 4 \\
      --pin 'classifier.1=holding:sharded,group:2' \\
      --pin 'classifier.4=sync:late_multiply' --pin 'classifier.6=role:fc'
  splitc inspect examples/alexnet.py --world 4 --json > report.json
  splitc inspect examples/alexnet.py --world 4 \\
      --cluster v100-10gbe,rtx4090-2.5gbe,my.toml --require 'samples/s>=400'
  splitc inspect examples/alexnet.py --world 4 --html report.html
""",
    "explain": """examples:
  splitc explain examples/alexnet.py classifier.1 --world 4 --cluster v100-10gbe
  splitc explain examples/alexnet.py --sensitivity --world 4 --cluster my.toml
  splitc explain examples/alexnet.py --buy --world 4 --cluster my.toml
""",
    "compile": """examples:
  splitc compile examples/alexnet.py --world 4 --cluster v100-10gbe -o build
  splitc compile examples/alexnet.py --world 4 --strategy layer_separation
  splitc compile examples/alexnet.py --world 4 --standalone
  splitc compile examples/alexnet.py --world 4 --min-world 2
  splitc compile examples/alexnet.py --world 4 --autocast bfloat16
  splitc compile examples/alexnet.py --plan build/plan.json -o again
then:
  splitc run build --steps 3
""",
    "diff": """examples:
  splitc diff build again
  splitc diff build/plan.json edited.json --json

Exit code 0: both decide the same, whatever they predict; 1: they differ.
""",
    "run": """examples:
  splitc run build
  splitc run build --steps 100 --data mydata:batches --save trained.pt
  splitc run build --hosts node1,node2
  splitc run build --restarts 10 --checkpoints run
  splitc run build --measure --trace steps.json
  splitc run build --measure --correct my.toml

options, after the folder
  --steps N               training steps (default 10)
  --data MODULE:FUNCTION  a Dataset or batches of a rank; else random ones
  --optimizer MODULE:FUNCTION, --lr RATE
                          in place of SGD with 0.01 and momentum 0.9
  --seed N                of dropout and of synthetic data (default 0)
  --backend NAME          gloo or nccl
  --device NAME           cpu or cuda
  --save FILE             write the trained model's state_dict there
  --measure               print what each rank computes, waits for and sends
                          beside what was predicted; 3 steps are left out
  --measured FILE         print likewise what launch.py --measure FILE wrote
  --trace FILE            with --measure: the last steps as a Chrome trace,
                          which opens in ui.perfetto.dev
  --correct CLUSTER.TOML  with --measure: correct this cluster file by what
                          was measured, or write a new one
  --json                  with --measure: print the comparison as JSON
  --html FILE             with --measure: write it as one page

  --hosts A,B:2           copy the build to these hosts over ssh, and run it
                          there; :2 are the ranks of one (default: even)
  --restarts N            after a failure go on from the last checkpoint
  --min-world N           with --hosts, without those that are lost go on with
                          N ranks or more (a build of compile --min-world)

A launch.py that you wrote yourself gets all but these as they stand. On
several machines you can also start torchrun yourself (docs/training.md);
launch.py --measure FILE then writes what was measured:
  torchrun --nnodes 2 --nproc-per-node 4 ... build/launch.py
""",
    "export": """examples:
  splitc export checkpoints --safetensors model.safetensors
  splitc export checkpoints/step-000120 --torch model.pt
""",
    "verify": """examples:
  splitc verify examples/mlp.py --world 4
  splitc verify examples/mlp.py --world 4 --dtype float64   (to 1e-9)
  splitc verify examples/mlp.py --world 4 --processes       (under torchrun)
  splitc verify examples/alexnet.py --world 4 --strategy layer_separation \\
      --input 4x3x224x224
""",
    "simulate": """examples:
  splitc simulate examples/alexnet.py --world 5:80 --bandwidth 25g,40g,100g \\
      --against parameter_server
  splitc simulate examples/vgg16.py --world 8,16 --strategies auto \\
      --cluster my.toml
  splitc simulate examples/alexnet.py --world 4 --strategies data_parallel \\
      --trace timeline.json

Each plan is the planner's best of its strategy, and its price that of an event
simulation.  --bandwidth is of the links between hosts, in bits per second.
""",
    "calibrate": """examples:
  splitc calibrate -o cluster.toml
  splitc calibrate -o quick.toml --budget 20 --ranks 2
  splitc inspect examples/alexnet.py --world 4 --cluster cluster.toml

It starts its ranks itself: one for each GPU, else one for each core. To measure
several machines, start it on them:
  torchrun --nnodes 2 --nproc-per-node 4 ... -m splitc.cli calibrate -o my.toml
""",
    "doctor": """examples:
  splitc doctor --hosts node1,node2,node3 --cluster cluster.toml
  splitc doctor --ranks 4
  torchrun --nnodes 2 --nproc-per-node 1 ... -m splitc.cli doctor

Exit code 0: nothing is wrong; 1: something is.
""",
    "example": """examples:
  splitc example
  splitc example alexnet mlp
""",
    "clusters": """examples:
  splitc clusters
  splitc clusters rtx4090-2.5gbe > my.toml
  splitc clusters --json
  splitc inspect examples/alexnet.py --world 4 --cluster v100-25gbe

A cluster of your own is a .toml file: --cluster my.toml
""",
}


def epilog(command: str = "") -> str:
    """What follows the options in the help of a command; of `splitc` itself without one."""
    takes_model = command in ("try", "inspect", "explain", "compile", "verify", "simulate")
    conventions = f"\n{_CONVENTIONS}\n" * takes_model
    return f"{_EXAMPLES.get(command, '')}{conventions}\n{_EXIT_CODES}"
