"""Errors that people can meet. The message states a fact and its cause, `remedy` the fix."""

from typing import Any

REBUILD = "Build and publish the release again (`preheat build`, `preheat publish`)."


class PreheatError(Exception):
    """Base class of errors whose text people read, in the log or in an answer.

    `str(error)` is the message followed by the remedy. A class has a general `remedy`; an instance may have a narrower
    one.
    """

    remedy = ""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        if remedy is not None:
            self.remedy = remedy

    def __str__(self) -> str:
        return f"{super().__str__()} {self.remedy}".strip()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process restore the error. Constructors of subclasses take other arguments than `args`."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[PreheatError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> PreheatError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


class ConfigError(PreheatError):
    """A deployment setting is missing, unknown or out of range."""

    remedy = "Fix it under model_metadata.preheat in config.yaml."


class StoreError(PreheatError):
    """The store cannot be reached, read or written."""


class ReleaseNotFound(StoreError):
    """The store has no release of the requested name."""


class ReleaseExists(StoreError):
    """The store already has a release of that name. Releases are written once."""

    remedy = "Choose another version."


class CorruptBlob(StoreError):
    """The bytes of a blob do not match its digest, or the blob is missing."""

    remedy = REBUILD


class ManifestError(PreheatError):
    """A manifest cannot be read: not JSON, a newer schema, a missing or unsafe entry."""

    remedy = REBUILD


class UntrustedRelease(PreheatError):
    """The deployment loads only releases signed by its keys, and this release is not."""


class MissingComponent(PreheatError):
    """The release lacks a component, weights or a tokenizer that serving needs."""

    remedy = REBUILD


class NoEngineForTarget(PreheatError):
    """The release has no engine that this device can run."""

    remedy = "Run `preheat build` on such a machine and publish a new release (`preheat publish`)."


class AdapterNotFound(StoreError):
    """The store has no adapter of the requested name."""


class AdapterExists(StoreError):
    """The store already has another adapter of that name. Adapters are written once."""

    remedy = "Choose another name."


class AdapterError(PreheatError):
    """An adapter cannot be used: its record or its tensors are damaged, or it does not fit the release."""

    remedy = "Remove it (`preheat remove-lora`), then add it again from its file (`preheat add-lora`)."


class OutOfDeviceMemory(PreheatError):
    """The configured sizes do not fit into the GPU's memory."""

    remedy = (
        "Configure smaller batches (`rows`) or fewer sizes (model_metadata.preheat.buckets in config.yaml), or use a "
        "GPU with more memory."
    )


class ReleaseNotLoaded(PreheatError):
    """The weights of a release of this server could not be brought onto the device, or the engine of a size without
    warm-up could not be read. Answered with status 503."""


class AdapterNotReady(PreheatError):
    """An adapter could not be read from the store, or not in time. Answered with status 503."""

    remedy = "Repeat the request."


class EngineError(PreheatError):
    """An engine cannot be opened, or received inputs or weights that it does not accept."""

    remedy = REBUILD


class RequestRefused(PreheatError):
    """A value of the request is invalid, or this deployment does not serve it. Answered with status 400.

    `field` is the request's field. The message states the value and what is accepted.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class BodyTooLarge(PreheatError):
    """The body of a request has too many bytes. Answered with status 413."""

    remedy = "Send smaller images: at most 32 MiB for each file, and 64 MiB for the whole body."


class BodyTooSlow(PreheatError):
    """The body of a request stopped arriving, or arrives too slowly. Answered with status 408."""

    remedy = "Send the whole body. On a slow connection send smaller images."


class BrokenImage(PreheatError):
    """An image holds NaN or infinite values. Answered with status 500, never with a black image."""

    remedy = (
        "Most often a VAE overflowed in fp16: build the model with its VAE in bf16 or fp32 "
        "(`preheat build --vae-precision bf16`), or with a VAE made for fp16."
    )


class OverflowingRequest(RequestRefused, BrokenImage):
    """An image holds NaN or infinite values, and values of its request may be the cause. Answered with status 422."""

    remedy = "Use smaller scales and weights; without them the model may generate this image."


class Overloaded(PreheatError):
    """The queue is full, or bodies take too much memory. Answered with status 429.

    `retry_after`: whole seconds to wait before the next try, an estimate.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(PreheatError):
    """No device can generate the images: it has failed, and its process is being replaced. Answered with status 503."""


class RankFailed(PreheatError):
    """A process that runs a share of each batch (`gpus_per_image`) did not load the release."""

    remedy = "The log above has its reason."


class WorkerFailed(PreheatError):
    """A process that generates images (`workers`) ended before it had loaded the release."""

    remedy = "The log above has its reason."


class DeadlineExceeded(PreheatError):
    """The request was not finished within the deployment's deadline. Answered with status 504."""

    remedy = "Request fewer steps or images, or try again later."


class Cancelled(PreheatError):
    """The client disconnected before the answer was complete. Only the log and the metrics report it."""
