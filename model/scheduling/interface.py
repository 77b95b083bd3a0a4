"""What a server uses of the scheduler of its engines, whether they are in its own process or in workers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from model.errors import Overloaded, PreheatError
from model.pipeline.params import GenerationParams
from model.scheduling.job import GenerationResult, ImageEvent, StepEvent
from model.settings import Limits
from model.store.adapter_record import AdapterRecord

Listener = Callable[[StepEvent | ImageEvent], None]


class RequestJob(Protocol):
    """An accepted request. Any thread may read its attributes and wait for its futures.

    result: the images, or the error that the request is answered with.
    planned: done once `steps` is known. It has the error of `result` if that came first.
    steps: those of all images.
    images_ahead: images that wait before this job's.
    """

    result: "Future[GenerationResult]"
    planned: "Future[None]"
    params: GenerationParams
    images_ahead: int

    @property
    def steps(self) -> int: ...


JobType = TypeVar("JobType", bound=RequestJob)


class JobScheduler(Protocol[JobType]):
    """Accepts requests and generates their images. Any thread may call it."""

    limits: Limits

    def submit(
        self,
        params: GenerationParams,
        listener: Listener | None,
        preview_every: int,
        model: int = 0,
        adapters: Sequence[AdapterRecord] = (),
    ) -> JobType:
        """Accept a request. `listener` is called on other threads. `preview_every`: steps between previews; 0: none.

        model: the index of the release in the deployment. adapters: those of the request that were found since the
        start.

        Raises Overloaded, Unavailable or RequestRefused.
        """
        ...

    def check_acceptable(self, count: int) -> None:
        """Raise Unavailable or Overloaded if `submit` would raise it for `count` images."""
        ...

    def cancel(self, job: JobType, error: PreheatError) -> None:
        """Answer a request with `error`, unless it was answered before, and stop its images."""
        ...

    def healthy(self) -> bool:
        """True if requests can be generated."""
        ...

    @property
    def adapters_on_device(self) -> frozenset[str]:
        """The adapters whose factors are on a device."""
        ...


def check_queue(queued: int, count: int, limit: int, retry_after: Callable[[], int]) -> None:
    """Raise Overloaded if a queue of `queued` images has no room for `count` more.

    retry_after: returns the seconds after which the request should be repeated.
    """
    if queued + count > limit:
        seconds = retry_after()
        raise Overloaded(
            f"{queued} images are waiting, and this server queues {limit}. Repeat the request in {seconds} s.", seconds
        )
