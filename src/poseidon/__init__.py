"""Poseidon trains PyTorch models over the hosts and the network that people actually have.

```python
import poseidon

poseidon.init()                                   # joins what torchrun or `poseidon lab` has started
run = poseidon.distribute(model, optimizer)       # in place; the training loop stays as it is
```

The names below are imported when they are first used, so that `poseidon --help` does not wait for torch.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from poseidon.auto import distribute as distribute
    from poseidon.cluster.rates import Rates as Rates
    from poseidon.cluster.spec import ClusterSpec as ClusterSpec
    from poseidon.plan import Plan as Plan
    from poseidon.planner.rules import choose_plan as choose_plan
    from poseidon.planner.search import search_plan as search_plan
    from poseidon.profile.graph import ModelProfile as ModelProfile
    from poseidon.profile.measure import profile_model as profile_model
    from poseidon.runtime.attach import Run as Run
    from poseidon.runtime.join import init as init
    from poseidon.runtime.join import shutdown as shutdown
    from poseidon.runtime.probing import probe_cluster as probe_cluster
    from poseidon.runtime.seeding import seed as seed
    from poseidon.simulator import simulate as simulate
    from poseidon.timeline import Timeline as Timeline

__version__ = "0.1.0"

_HOMES = {
    "ClusterSpec": "poseidon.cluster.spec",
    "ModelProfile": "poseidon.profile.graph",
    "Plan": "poseidon.plan",
    "Rates": "poseidon.cluster.rates",
    "Run": "poseidon.runtime.attach",
    "Timeline": "poseidon.timeline",
    "choose_plan": "poseidon.planner.rules",
    "distribute": "poseidon.auto",
    "init": "poseidon.runtime.join",
    "probe_cluster": "poseidon.runtime.probing",
    "profile_model": "poseidon.profile.measure",
    "search_plan": "poseidon.planner.search",
    "seed": "poseidon.runtime.seeding",
    "shutdown": "poseidon.runtime.join",
    "simulate": "poseidon.simulator",
}

__all__ = [
    "ClusterSpec",
    "ModelProfile",
    "Plan",
    "Rates",
    "Run",
    "Timeline",
    "choose_plan",
    "distribute",
    "init",
    "probe_cluster",
    "profile_model",
    "search_plan",
    "seed",
    "shutdown",
    "simulate",
]


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'poseidon' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
