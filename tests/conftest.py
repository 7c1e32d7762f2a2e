"""What all tests share: chance that is the same every time, and no test that fails because the machine is busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("espalier", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("espalier")
