"""What production engines add on top of the six stages; each folder is a lesson."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # a learner's copy holds one folder, the rest is here
