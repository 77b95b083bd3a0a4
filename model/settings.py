"""Every setting of a deployment: the environment first, then `model_metadata.preheat` of its config.yaml.

Unknown names are refused: a misspelled `public_key` would switch off the check of signatures.
"""

import os
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from model.errors import ConfigError
from model.store.keys import is_adapter_name
from model.store.manifest import Fp16Steps
from model.store.options import StoreOptions, expand_cache_folder
from model.store.signature import PublicKey, parse_public_keys
from model.validation import BAND_COUNTS, MAX_IMAGES, Safety, StrictModel, explain, format_value, refusal

RuntimeChoice = Literal["aot_inductor", "tensorrt", "tensorrt-rtx", "fastest"]
# Setting -> environment variables that override it, in order of precedence.
_VARIABLES: dict[str, tuple[str, ...]] = {
    "store": ("PREHEAT_STORE",),
    "release": ("PREHEAT_RELEASE",),
    "releases": ("PREHEAT_RELEASES",),
    "runtime": ("PREHEAT_RUNTIME",),
    "precision": ("PREHEAT_PRECISION",),
    "public_key": ("PREHEAT_PUBLIC_KEY",),
    "loras": ("PREHEAT_LORAS",),
    "safety": ("PREHEAT_SAFETY",),
    "cache_dir": ("PREHEAT_CACHE_DIR",),
    "cache_bytes": ("PREHEAT_CACHE_BYTES",),
    "grace_seconds": ("PREHEAT_GRACE_SECONDS",),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "profile": ("AWS_PROFILE",),
}
STORE_SETTINGS = ("cache_dir", "cache_bytes", "endpoint", "region", "profile")
_SECTION = "model_metadata.preheat"
_SECRETS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _parse_keys(value: Any) -> Any:
    try:
        return parse_public_keys(value)
    except ConfigError as error:
        raise refusal(f"{error}".rstrip(".")) from error


def _parse_bytes(value: Any) -> int:
    """Return the bytes of a number or a size: 10000000000 or "10GiB"."""
    text = str(value).strip()
    digits = text.rstrip("KMGTiB ")
    unit = text[len(digits) :].strip()
    if isinstance(value, bool) or not digits.isdecimal() or unit not in _UNITS or not int(digits):
        raise refusal(f"got {format_value(value)}, expected a whole number of bytes or a size like 20GiB")
    return int(digits) * _UNITS[unit]


def _parse_number(value: Any) -> Any:
    """Return the number of a text: a variable of the environment."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError as error:
        raise refusal(f"got {format_value(value)}, expected a number of seconds") from error


def _split_names(value: Any) -> Any:
    """Return the names of a text, which are separated by commas."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def _name_off(value: Any) -> Any:
    """Return "off" for false: YAML reads the word off, without quotes, as false."""
    return "off" if value is False else value


def _check_adapter(name: str) -> str:
    if not is_adapter_name(name.replace("*", "x").replace("?", "x")):
        raise refusal(
            f"got {format_value(name)}, expected the name of an adapter (letters, digits, '.', '_' and '-'), or a "
            "pattern with * and ?"
        )
    return name


AdapterPattern = Annotated[str, AfterValidator(_check_adapter)]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=True)]  # infinity switches a limit off


class ServedBucket(StrictModel):
    """One entry of `buckets`: a size in pixels, and the largest UNet batch (`rows`) at it."""

    height: Positive
    width: Positive
    rows: Positive
    warm_up: bool = True
    """False: the size is not part of the start. Its first request captures its graphs, and others wait meanwhile."""


class Limits(StrictModel):
    """The limits of one replica."""

    max_queue: Annotated[int, Field(ge=MAX_IMAGES)] = 64
    """Images that may wait for the denoising loop; further requests are refused at once."""
    deadline_seconds: Seconds = 300.0
    """Seconds from the arrival of a request to the answer."""
    stuck_seconds: Seconds = 120.0
    """Seconds without progress after which the device counts as failed."""
    sizes_at_once: Positive = 4
    """Sizes that are denoised alternately, step by step. A further size waits until one of them is done."""
    lora_turn_seconds: Seconds = 2.0
    """Seconds for which requests with the merged adapters go first, while a request with others waits."""
    lora_wait_seconds: Seconds = 30.0
    """Seconds that a request waits for adapters that are read from the store for the first time."""
    lora_fetches_at_once: Positive = 4
    """New adapters that are read from the store at the same time."""
    lora_fetches_per_minute: Positive = 60
    """New adapters that are read from the store in a minute. Requests for more are refused."""
    release_turn_seconds: Seconds = 2.0
    """Seconds for which requests of the releases on the device go first, while a request of another one waits."""


class Settings(StrictModel):
    """The settings of a deployment. `store` and `release` are "" until they are configured."""

    store: str = ""
    release: str = ""
    releases: Annotated[list[str], BeforeValidator(_split_names)] = []
    """Several releases, in place of `release`; "NAME/*": all versions. Requests without `model` get the first."""
    weight_slots: Positive | None = None
    """The most releases whose weights are on the device at once; None: as many as its memory holds."""
    runtime: RuntimeChoice = "aot_inductor"
    precision: Literal["fp16", "bf16", "fp32", "fp8", "int8"] | None = None
    """Of the UNet's engines; None: the first of these that the release has."""
    fp16_steps: Fp16Steps | None = None
    """Of 8-bit UNets: the first and last steps that run in fp16; None: the release's default."""
    compare_every: Positive | None = None
    """Of 8-bit UNets: one in so many images is compared with fp16 while the server is idle; None: no image."""
    public_key: Annotated[list[PublicKey], BeforeValidator(_parse_keys), Field(strict=False)] = []
    """Releases must be signed by one of these; empty: no signature is needed."""
    cache_dir: str | None = None
    cache_bytes: Annotated[int | None, BeforeValidator(_parse_bytes)] = None
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    buckets: list[ServedBucket] = []
    """The sizes served; empty: all sizes of the release."""
    limits: Limits = Limits()
    loras: Annotated[list[AdapterPattern], BeforeValidator(_split_names)] = []
    """The adapters of the store that requests may use. With `*` or `?`: those that the store has when it is asked."""
    follow_embeddings: bool = False
    """True: embeddings of later versions of the releases (`preheat add-embedding`) are taken over without a restart."""
    gpus_per_image: Annotated[int, Field(ge=1, le=8)] = 1
    """GPUs that divide the UNet's batch among them, so that the halves of guidance run at the same time."""
    workers: Annotated[int, Field(ge=1, le=8)] | None = None
    """Processes that generate images, each on `gpus_per_image` GPUs of its own; None: as many as the GPUs allow."""
    bands_per_image: Annotated[int, Field(ge=1, le=8)] = 1
    """Bands that each image is divided into. `gpus_per_image` is a multiple of it: each GPU of so many computes one."""
    lora_cache_bytes: Annotated[int, BeforeValidator(_parse_bytes)] = 4 * 2**30
    """Limit of the adapters that stay on the device when they are not used."""
    grace_seconds: Annotated[Seconds, BeforeValidator(_parse_number)] = 25.0
    """Seconds after SIGTERM in which accepted requests finish. Then all others are answered with status 503."""
    log_prompts: bool = False
    safety: Annotated[Safety, BeforeValidator(_name_off)] = "off"
    """What happens with images that the release's safety checker flags: nothing, as it is not loaded (off); the answer
    states it (flag); and they are replaced by black images (blank)."""

    @field_validator("release")
    @classmethod
    def _check_release(cls, release: str) -> str:
        if release.endswith("/*"):
            raise refusal(f"{release}, and only `releases` may stand for all versions of a model")
        return release

    @field_validator("releases")
    @classmethod
    def _check_releases(cls, releases: list[str], info: ValidationInfo) -> list[str]:
        if releases and info.data.get("release"):
            raise refusal(f"{', '.join(releases)[:100]}, and release is {info.data['release']}: set one of the two")
        return releases

    @field_validator("compare_every")
    @classmethod
    def _check_compare_every(cls, every: int | None, info: ValidationInfo) -> int | None:
        if every is not None and info.data.get("releases"):
            raise refusal(f"{every}, and several `releases`: images of one release are compared")
        return every

    @field_validator("cache_dir")
    @classmethod
    def _check_cache_dir(cls, folder: str | None) -> str | None:
        # A home folder (~) is expanded on the machine that uses the folder: `check-config` reads settings elsewhere.
        if "\0" in (folder or ""):
            raise refusal(f"got {folder!r}, which contains a NUL character")
        return folder

    @field_validator("buckets")
    @classmethod
    def _check_buckets(cls, buckets: list[ServedBucket]) -> list[ServedBucket]:
        if buckets and not any(bucket.warm_up for bucket in buckets):
            raise refusal("no bucket with `warm_up`: the start must run one size")
        return buckets

    @field_validator("gpus_per_image")
    @classmethod
    def _check_gpus_per_image(cls, gpus: int, info: ValidationInfo) -> int:
        if gpus > 1 and info.data.get("loras"):
            raise refusal(f"{gpus} GPUs for each image, and adapters in `loras`: adapters need gpus_per_image 1")
        if gpus > 1 and info.data.get("releases"):
            raise refusal(f"{gpus} GPUs for each image, and several `releases`: these need gpus_per_image 1")
        return gpus

    @field_validator("bands_per_image")
    @classmethod
    def _check_bands_per_image(cls, bands: int, info: ValidationInfo) -> int:
        if bands not in (1, *BAND_COUNTS):
            raise refusal(f"{bands} bands for each image; possible are {', '.join(map(str, (1, *BAND_COUNTS)))}")
        gpus = info.data.get("gpus_per_image", bands)
        if gpus % bands:
            raise refusal(f"{bands} bands for each image, and gpus_per_image is {gpus}, which is no multiple of it")
        if bands > 1 and info.data.get("runtime", "aot_inductor") != "aot_inductor":
            raise refusal(f"{bands} bands for each image, and runtime is {info.data['runtime']}: plans have no bands")
        if bands > 1 and info.data.get("compare_every"):
            raise refusal(f"{bands} bands for each image, and compare_every: images are compared on one GPU only")
        return bands

    def has_one_worker(self, gpus: int) -> bool:
        """True if images are generated in the server's own process; see `worker_count`."""
        return (self.workers or gpus // self.gpus_per_image) <= 1

    def worker_count(self, gpus: int) -> int:
        """Return the number of workers on a machine with this number of visible GPUs, 0 for a CPU.

        Raises ConfigError if there are too few GPUs.
        """
        if self.workers is None:
            return max(1, gpus // self.gpus_per_image)
        needed = self.workers * self.gpus_per_image
        if gpus and self.workers > 1 and gpus < needed:
            raise ConfigError(
                f"{self.workers} workers with {self.gpus_per_image} GPUs for each image need {needed} GPUs, and this "
                f"machine has {gpus}.",
                f"Deploy with as many GPUs (`accelerator: H100:{needed}`), or lower workers.",
            )
        return self.workers

    def of_release(self, release: str) -> "Settings":
        """Return the settings of a deployment of this release only."""
        return self.model_copy(update={"release": release, "releases": []})

    def release_patterns(self) -> tuple[str, ...]:
        """Return `release`, or `releases`. Raises ConfigError if neither is configured."""
        return tuple(self.releases) or (self.required("release"),)

    def required(self, name: Literal["store", "release"]) -> str:
        """Return a setting that has no default. Raises ConfigError if it is missing."""
        value: str = getattr(self, name)
        if not value:
            raise ConfigError(
                f"No {name} is configured.",
                f"Set model_metadata.preheat.{name} in config.yaml, or PREHEAT_{name.upper()}.",
            )
        return value

    def store_options(self, secrets: Mapping[str, str] | None = None) -> StoreOptions:
        """Return the options of the store, with credentials of Truss `secrets` unless the environment has its own."""
        # An access key without its secret is useless, so secrets count only if both are set.
        keys: list[str | None] = [None, None, None]
        if not (os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_PROFILE")):
            values = [_secret(secrets, name) for name in _SECRETS]
            keys = values if values[0] and values[1] else keys
        return StoreOptions(
            cache_dir=expand_cache_folder(self.cache_dir) if self.cache_dir else None,
            cache_bytes=self.cache_bytes,
            endpoint=self.endpoint,
            region=self.region,
            profile=None if keys[0] else self.profile,
            access_key_id=keys[0],
            secret_access_key=keys[1],
            session_token=keys[2],
        )


def read_settings(
    section: Any = None,
    variables: Collection[str] = tuple(_VARIABLES),
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Read settings from `environment` and `section` (model_metadata.preheat; None: the environment alone).

    `variables`: the settings that the environment may override. `release` and `releases` override each other. Null, and
    "" for a text, count as missing. Raises ConfigError that names the setting, its value and what is accepted.
    """
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"{_SECTION} is {format_value(section)}, expected settings by name.")
    values = dict(section or {})
    for name in Settings.model_fields.keys() & values.keys():
        if values[name] is None or (values[name] == "" and name in _VARIABLES):
            del values[name]
    sources = {}
    for name in variables:
        variable = next((one for one in _VARIABLES[name] if environment.get(one, "").strip(", ")), None)
        if variable is not None:
            values[name], sources[name] = environment[variable], variable
    for name, other in (("release", "releases"), ("releases", "release")):
        if name in sources and other not in sources:
            values.pop(other, None)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problem = explain(error, Settings)[0]
        name = (problem.field or "").partition(".")[0]
        if name in sources:
            raise ConfigError(f"{sources[name]}: {problem.message}.", f"Fix the variable {sources[name]}.") from error
        raise ConfigError(f"{'.'.join(filter(None, (_SECTION, problem.field)))}: {problem.message}.") from error


def plain_secrets(secrets: Mapping[str, str] | None) -> dict[str, str]:
    """Return the Truss secrets that a store may need and that are set, for another process.

    Truss's own mapping cannot be listed, copied or sent.
    """
    values = {name: _secret(secrets, name) for name in _SECRETS}
    return {name: value for name, value in values.items() if value}


def _secret(secrets: Mapping[str, str] | None, name: str) -> str | None:
    """Return a Truss secret, or None if it is not set. Truss then raises a class that only its server can import."""
    try:
        value = (secrets or {})[name]
    except KeyError:
        return None
    except Exception as error:
        if type(error).__name__ != "SecretNotFound":
            raise
        return None
    return value.strip() or None  # a mounted secret is a file, and files end in a line break
