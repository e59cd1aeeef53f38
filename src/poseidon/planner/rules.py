"""Poseidon's rule: for each layer the scheme that costs least, as a pure function of the layer and a few rates.

The paper compares numbers moved: sufficient factors where 2K(P1-1)(M+N) <= 2MN(P1+P2-2)/P2, the parameter server
elsewhere. With servers on the workers that is K·P·(M+N) <= 2·M·N. Here the same comparison is made in seconds: bytes
over the bandwidth that each kind of transfer really reaches, plus the rebuild that the paper leaves out, 2·P·K·M·N
operations on every rank at the measured rate. With equal bandwidths and a free rebuild the paper's rule remains.

Source: Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU
clusters", ATC 2017, section 3.2, table 1 and algorithm 1 (BestScheme).
"""

from collections.abc import Sequence

from poseidon.cluster.rates import Rates
from poseidon.comm import AllReduce, CommScheme, SparseRows, SufficientFactor
from poseidon.plan import Choice, Plan
from poseidon.profile.graph import LayerSpec, ModelProfile

CANDIDATES: tuple[CommScheme, ...] = (AllReduce(), SufficientFactor(), SparseRows())
"""What the rule chooses from: schemes that keep DDP's contract. `sharded_server` moves as many bytes as all-reduce
but leaves the mean with the optimizer instead of in `p.grad`, so it is used only where somebody asks for it."""


def paper_prefers_factors(*, rows: int, out_features: int, in_features: int, workers: int, servers: int) -> bool:
    """The rule as printed, in numbers moved: whether a fully connected layer goes by sufficient factors.

    Args:
        rows: K, samples per worker.
        out_features: M.
        in_features: N.
        workers: P1.
        servers: P2.
    """
    factors = 2 * rows * (workers - 1) * (out_features + in_features)
    server = 2 * out_features * in_features * (workers + servers - 2) / servers
    return factors <= server


def best_scheme(layer: LayerSpec, rates: Rates) -> tuple[CommScheme, Choice]:
    """The cheapest scheme for one layer, and what each that it could use would cost.

    Args:
        layer: With the rows that one rank has per step.
        rates: What the ranks compute and move.

    Returns:
        The scheme, and the seconds per step of all that the layer can use. Equal costs go to the earlier in
        `CANDIDATES`, except that a layer whose gradient is made sparse has to go by rows.
    """
    usable = [scheme for scheme in CANDIDATES if scheme.refuse(layer) is None]
    seconds = {scheme.kind: scheme.cost(layer, rates).seconds for scheme in usable}
    best = min(usable, key=lambda scheme: seconds[scheme.kind])
    refusal = SufficientFactor().refuse(layer) if layer.reason else None
    return best, Choice(seconds_by_scheme=seconds, reason=refusal or "")


def choose_plan(
    profile: ModelProfile, rates: Rates, arrival: Sequence[str] = (), *, sparse: Sequence[str] = ()
) -> Plan:
    """The rule applied to every layer.

    Args:
        profile: The model, with rows.
        rates: What the ranks compute and move.
        arrival: Layers in the order in which their gradients become ready; the reverse of forward if it is not known.
        sparse: Layers whose gradients autograd makes sparse; only `sparse_rows` carries these.

    Returns:
        A plan for `rates.world_size` ranks.
    """
    chosen = {layer.name: best_scheme(layer, rates) for layer in profile.trainable}
    schemes = {name: SparseRows() if name in sparse else scheme for name, (scheme, _) in chosen.items()}
    return Plan.model_validate(
        {
            "world_size": rates.world_size,
            "profile": profile,
            "schemes": schemes,
            "arrival": tuple(arrival) or tuple(layer.name for layer in reversed(profile.trainable)),
            "connections": rates.connections,
            "choices": {name: choice for name, (_, choice) in chosen.items()},
        }
    )
