"""The rate limit of one key, as pure arithmetic: its clock is a parameter."""

from __future__ import annotations

from attrs import define


@define
class TokenBucket:
    """A token bucket: any `t` seconds take at most `burst + rate_per_s * t` tokens from it."""

    rate_per_s: float
    burst: int
    _tokens: float
    _filled_at: float

    @classmethod
    def full(cls, rate_per_s: float, burst: int, now: float) -> TokenBucket:
        """Return a full bucket."""
        return cls(rate_per_s, burst, float(burst), now)

    def take(self, now: float) -> float:
        """Take one token and return 0.0, or take none and return the seconds until there is one."""
        self._fill(now)
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self.rate_per_s

    def change(self, rate_per_s: float, burst: int, now: float) -> None:
        """Set another rate and burst; tokens beyond the new burst are lost."""
        self._fill(now)
        self.rate_per_s, self.burst = rate_per_s, burst
        self._tokens = min(self._tokens, float(burst))

    def _fill(self, now: float) -> None:
        # A clock that stands still or goes back adds nothing.
        if now > self._filled_at:
            self._tokens = min(float(self.burst), self._tokens + (now - self._filled_at) * self.rate_per_s)
            self._filled_at = now
