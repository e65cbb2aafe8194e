"""What ranks do with servers, and as such."""

from __future__ import annotations

from splitc.ir.schedule.verb import Among, Often, Verb, Waits, When
from splitc.ir.wire_op import What

VERBS = {
    "send_parameters": Verb("send a server's parameters to the workers",
        when=When.FIRST_OF_UPDATE, among=Among.OWN, what=What.PULL, waits=Waits.AT_THE_END, forward=True,
        line="send_parameters(stage, SERVED)", note="to the workers"),
    "pull": Verb("receive parameters from the servers",
        when=When.FIRST_OF_UPDATE, among=Among.OWN, what=What.PULL, waits=Waits.BY_NODES, forward=True,
        before=("forward",)),
    "push": Verb("send a bucket of gradients to the servers",
        Often.EACH_MICROBATCH, When.LAST_OF_UPDATE, Among.OWN, What.PUSH, waits=Waits.AFTER_BACKWARD,
        after=("backward", "multiply"), buckets="served", sync="parameter_server", unit="backward"),
    "reduce_gradients": Verb("sum the workers' gradients on a server",
        when=When.LAST_OF_UPDATE, among=Among.OWN, what=What.PUSH, waits=Waits.ONE_BY_ONE,
        line="reduce_gradients(stage, SERVED)", note="summed over the workers"),
}  # fmt: skip
