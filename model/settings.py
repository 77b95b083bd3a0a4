"""The section `model_metadata.preheat` of a deployment's config: which settings there are. What each may be, its reader
says. An unknown name is refused and never passed over: a `public_key` by another name would be no key at all."""

from collections.abc import Mapping
from typing import Any

from model.errors import ManifestError

_KINDS: dict[str, tuple[type, ...]] = {
    "store": (str,),
    "release": (str,),
    "runtime": (str,),
    "public_key": (str, list),
    "cache_dir": (str,),
    "cache_bytes": (int, str),
    "endpoint": (str,),
    "region": (str,),
    "profile": (str,),
    "buckets": (list,),
    "limits": (dict,),
    "log_prompts": (bool,),
}


def read_section(section: Any) -> dict[str, Any]:
    """The settings that are given. Raises ManifestError for a name that is none, or what cannot be its value."""
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ManifestError(
            f"config: model_metadata.preheat is {section!r:.50}, not settings by name: mend it in config.yaml."
        )
    for name, value in section.items():
        if name not in _KINDS:
            raise ManifestError(
                f"config: {name!r:.50} is no setting; those of model_metadata.preheat are {', '.join(_KINDS)}: mend it "
                "in config.yaml."
            )
        if value is not None and not isinstance(value, _KINDS[name]):
            kinds = " or ".join(kind.__name__ for kind in _KINDS[name])
            raise ManifestError(
                f"config: {name} is {value!r:.50}, not a {kinds}: mend model_metadata.preheat.{name} in config.yaml."
            )
    return dict(section)
