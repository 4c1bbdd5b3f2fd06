import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

from specdec_kernels import native

sys.path.insert(0, str(Path(__file__).parent))

if native.triton_interprets:
    import triton_interpreter  # noqa: F401

# `pytest -k fuzz --hypothesis-profile=nightly` takes an hour or so.
for name, examples in (("ci", 200), ("nightly", 5000)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=name == "ci",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile("ci")
