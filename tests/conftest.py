import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

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
