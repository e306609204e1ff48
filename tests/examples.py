"""With how many examples a property is tried: three times as many in `make test-all`."""

from hypothesis import settings


def examples(count: int, **others: int) -> settings:
    """The settings of a property that the everyday run tries with `count` examples."""
    return settings(max_examples=count * settings.default.max_examples // 100, deadline=None, **others)
