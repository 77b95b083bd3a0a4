#!/usr/bin/env python3
"""Set how many replicas a deployment has, from development.json or production.json in this folder.

    python truss/autoscaling/apply.py production --model MODEL_ID            # only prints the request
    BASETEN_API_KEY=... python truss/autoscaling/apply.py production --model MODEL_ID --apply

Autoscaling is not part of config.yaml: the platform accepts it only by its management API (PATCH
/v1/models/MODEL_ID/deployments/DEPLOYMENT/autoscaling_settings). concurrency_target counts
requests. It is the largest batch that still improves throughput: 8 images with guidance, the 16 rows of config.yaml's
bucket. Imports only the standard library.
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
# Setting -> lowest and highest value that the platform accepts.
RANGES = {
    "min_replica": (0, 10_000),
    "max_replica": (1, 10_000),
    "autoscaling_window": (10, 3600),
    "scale_down_delay": (0, 3600),
    "concurrency_target": (1, 10_000),
    "target_utilization_percentage": (1, 100),
}


def read_settings(path: Path) -> dict[str, int]:
    """Return the settings in a file. Exits with an error message if the platform would refuse them."""
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    if not isinstance(settings, dict):
        sys.exit(f"{path} does not hold an object of settings.")
    for name, value in settings.items():
        lowest, highest = RANGES.get(name, (0, -1))
        if type(value) is not int or not lowest <= value <= highest:
            known = ", ".join(f"{key} ({low} to {high})" for key, (low, high) in RANGES.items())
            sys.exit(f"{path}: {name} is {value!r}; the settings are whole numbers: {known}.")
    if settings.get("min_replica", 0) > settings.get("max_replica", 10_000):
        sys.exit(f"{path}: min_replica is above max_replica.")
    return settings


def send(url: str, api_key: str, settings: dict[str, int]) -> str:
    """Send the settings and return the platform's answer. Exits with an error message if it refuses them."""
    request = urllib.request.Request(
        url,
        data=json.dumps(settings).encode(),
        method="PATCH",
        headers={"Authorization": f"Api-Key {api_key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            body = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        sys.exit(f"{url} refused: {error.code} {error.read().decode(errors='replace')[:500]}")
    except (OSError, ValueError) as error:
        sys.exit(f"{url} gave no answer: {error}")
    return f"{body.get('status')}: {body.get('message')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("environment", choices=["development", "production"])
    parser.add_argument("--model", required=True, help="The platform's id of the model.")
    parser.add_argument("--deployment", help="A deployment's id; default: the environment's own deployment.")
    parser.add_argument("--apply", action="store_true", help="Send the request; without this option nothing is sent.")
    parser.add_argument("--api", default=API, help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = read_settings(Path(__file__).with_name(f"{options.environment}.json"))
    model, deployment = (
        urllib.parse.quote(name, safe="") for name in (options.model, options.deployment or options.environment)
    )
    url = f"{options.api}/v1/models/{model}/deployments/{deployment}/autoscaling_settings"
    print(f"PATCH {url}\n{json.dumps(settings, indent=2)}")
    if not options.apply:
        print("Nothing was sent: add --apply.")
        return
    api_key = os.environ.get("BASETEN_API_KEY")
    if not api_key:
        sys.exit("BASETEN_API_KEY is not set. Set it to the workspace's API key.")
    print(send(url, api_key, settings))


if __name__ == "__main__":
    main()
