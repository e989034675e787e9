"""The errors of the package. Every text says where, what was found, what was expected and what to do."""


class PowerInferError(Exception):
    """Base of all errors that this package raises on purpose."""


class FormatError(PowerInferError, ValueError):
    """A file isn't what it should be: not a GGUF, damaged, of a newer version, or against FORMAT rules."""


class PlanError(PowerInferError, ValueError):
    """A plan can't be used: it belongs to another model, covers nothing, or can't run the mode asked for."""


class OptionError(PowerInferError, TypeError):
    """An option doesn't exist, or its value can't be used."""


class BudgetError(PowerInferError, ValueError):
    """A VRAM budget can't be kept: the model doesn't fit, or no neuron went to the GPU where one was required."""


class ClosedError(PowerInferError, RuntimeError):
    """The object was closed before."""


class NoiseError(PowerInferError, RuntimeError):
    """A benchmark ran on a machine that did too much else; its figures mean nothing."""


class QueueFullError(PowerInferError, RuntimeError):
    """A server has as many requests waiting as it may have; try again later."""


class RequestTimeoutError(PowerInferError, TimeoutError):
    """A request wasn't answered in the time that it had."""


class CancelledError(PowerInferError, RuntimeError):
    """A request was cancelled: its client went away, or the server ends."""
