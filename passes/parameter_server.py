"""What one parameter server would take, by the formula of its paper: a price to compare with, not a plan.

    t_ps = 2 n_w P / (n_s B) + T_ps        Stanza (Wu et al. 2018), equation (6), with n_s = 1

Of the world's ranks one is the server and the others are workers that read the data.  P is the bytes of all
gradients, B the bandwidth of the server's link, T_ps the compute of a whole step on one worker.
"""

from __future__ import annotations

from cost_models.stanza import Symbols, ps_step_seconds
from passes.families import Request, largest
from splitc.plan import Candidate

NAME = "parameter_server"
SERVERS = 1


def parameter_server(request: Request) -> Candidate:
    """The price; never feasible, since splitc cannot generate such programs yet."""
    workers = request.world - SERVERS
    if workers < 1:
        why = f"a world of {request.world} has no room for a server and a worker"
        return Candidate(NAME, 0.0, 0.0, 0, exact=True, feasible=False, why=why)
    examples = request.bounds(workers)
    batch, device = largest(examples), request.cluster.device_for(workers)
    symbols = Symbols(
        K=batch,
        P=sum(request.gradient(layer.name) for layer in request.program.layers),
        A=0.0,
        P_c=0.0,
        B=request.cluster.link.bandwidth,
        T_c=0.0,
        T_f=0.0,
        T_ps=sum(request.seconds(layer.name, batch, device) for layer in request.program.layers),
        itemsize=1,  # P is in bytes
    )
    seconds = ps_step_seconds(symbols, workers, SERVERS)
    return Candidate(
        NAME,
        seconds,
        examples[-1] / seconds if seconds else 0.0,
        examples[-1],
        exact=True,
        feasible=False,
        why="priced by formula only (Stanza, equation 6, one server); splitc cannot generate it yet",
        roles={"worker": tuple(range(workers)), "server": (workers,)},
    )
