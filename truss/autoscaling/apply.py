#!/usr/bin/env python3
"""Set how many replicas a deployment has, from development.json or production.json beside this file.

    python truss/autoscaling/apply.py production --model MODEL_ID            # says what it would send
    BASETEN_API_KEY=... python truss/autoscaling/apply.py production --model MODEL_ID --apply

Autoscaling is no part of config.yaml: the platform takes it by its management API only (PATCH
/v1/models/MODEL_ID/deployments/DEPLOYMENT/autoscaling_settings). concurrency_target is the largest batch that still
pays, in requests: 8 images with guidance are the 16 rows of config.yaml's bucket. Standard library only.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

API = "https://api.baseten.co"
TIMEOUT_SECONDS = 30
# What the platform takes: least and most.
RANGES = {
    "min_replica": (0, 10_000),
    "max_replica": (1, 10_000),
    "autoscaling_window": (10, 3600),
    "scale_down_delay": (0, 3600),
    "concurrency_target": (1, 10_000),
    "target_utilization_percentage": (1, 100),
}


def read_settings(path: Path) -> dict[str, int]:
    """The settings of a file, checked. Exits with one sentence where they are not what the platform takes."""
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    if not isinstance(settings, dict):
        sys.exit(f"{path} holds no object of settings.")
    for name, value in settings.items():
        least, most = RANGES.get(name, (0, -1))
        if type(value) is not int or not least <= value <= most:
            known = ", ".join(f"{key} ({low} to {high})" for key, (low, high) in RANGES.items())
            sys.exit(f"{path}: {name} is {value!r}; the settings are whole numbers: {known}.")
    if settings.get("min_replica", 0) > settings.get("max_replica", 10_000):
        sys.exit(f"{path}: min_replica is above max_replica.")
    return settings


def patch(url: str, key: str, settings: dict[str, int]) -> str:
    """Send them; returns the platform's own words. Exits with its reason where it refuses."""
    request = urllib.request.Request(
        url,
        data=json.dumps(settings).encode(),
        method="PATCH",
        headers={"Authorization": f"Api-Key {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            said = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        sys.exit(f"{url} refused: {error.code} {error.read().decode(errors='replace')[:500]}")
    except (OSError, ValueError) as error:
        sys.exit(f"{url} gave no answer: {error}")
    return f"{said.get('status')}: {said.get('message')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("environment", choices=["development", "production"])
    parser.add_argument("--model", required=True, help="The platform's id of the model.")
    parser.add_argument("--deployment", help="A deployment's id; default: the environment's own deployment.")
    parser.add_argument("--apply", action="store_true", help="Send it; without this nothing leaves the machine.")
    parser.add_argument("--api", default=API, help=argparse.SUPPRESS)
    given = parser.parse_args()
    settings = read_settings(Path(__file__).with_name(f"{given.environment}.json"))
    model, deployment = (
        urllib.parse.quote(name, safe="") for name in (given.model, given.deployment or given.environment)
    )
    url = f"{given.api}/v1/models/{model}/deployments/{deployment}/autoscaling_settings"
    print(f"PATCH {url}\n{json.dumps(settings, indent=2)}")
    if not given.apply:
        print("Nothing was sent: add --apply.")
        return
    key = os.environ.get("BASETEN_API_KEY")
    if not key:
        sys.exit("BASETEN_API_KEY is not set: it is the workspace's API key.")
    print(patch(url, key, settings))


if __name__ == "__main__":
    main()
