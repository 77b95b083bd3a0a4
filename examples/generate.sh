#!/usr/bin/env bash
# Generate one image with curl, and write it to a file. Needs neither Python nor jq.
#
#   generate.sh PROMPT [FILE [FIELDS]]
#   generate.sh "a red circle on a white background" circle.png '{"seed": 2}'
#
# MODEL_URL is the address of the model; the default is a local server. The key in BASETEN_API_KEY is sent only over
# https. A refusal prints the server's message and exits with status 1.
set -euo pipefail
export LC_ALL=C # the answer is one line of several megabytes, which tools search faster as bytes

fail() {
  echo "error: $*" >&2
  exit 1
}

if [ $# -lt 1 ] || [ $# -gt 3 ]; then
  echo "usage: generate.sh PROMPT [FILE [FIELDS]]" >&2
  exit 2
fi
prompt=$1
out=${2:-image.png}
fields=${3:-}
url=${MODEL_URL:-http://127.0.0.1:8080/v1/models/model:predict}
case $out in
  *.png) format=png ;;
  *.jpg | *.jpeg) format=jpeg ;;
  *.webp) format=webp ;;
  *) fail "$out must end in .png, .jpg, .jpeg or .webp." ;;
esac

part=$out.$$.part
work=$(mktemp -d)
trap 'rm -rf "$work" "$part"' EXIT
(: > "$part") 2> "$work/reason" || fail "$out cannot be written. Name another file."

# The prompt as a JSON string.
prompt=${prompt//\\/\\\\}
prompt=${prompt//\"/\\\"}
prompt=${prompt//$'\n'/\\n}
prompt=${prompt//$'\r'/\\r}
prompt=${prompt//$'\t'/\\t}
# The fields without their outer braces.
fields=${fields#\{}
fields=${fields%\}}
printf '{"prompt": "%s", "output_format": "%s"%s}' "$prompt" "$format" "${fields:+, $fields}" > "$work/request"
# The key is in a file, because other users can read the arguments of a process.
: > "$work/headers"
if [[ $url == https://* && -n ${BASETEN_API_KEY:-} ]]; then
  printf 'Authorization: Api-Key %s\n' "$BASETEN_API_KEY" > "$work/headers"
fi

# Longer than a server's deadline (300 s by default), so that the server can report its deadline.
status=$(curl --silent --show-error --connect-timeout 10 --max-time 330 --noproxy 127.0.0.1,localhost \
  --header "Content-Type: application/json" --header "@$work/headers" --data-binary "@$work/request" \
  --output "$work/answer" --write-out '%{http_code}' "$url" 2> "$work/reason") ||
  fail "$url gave no answer: $(cat "$work/reason"). Check MODEL_URL, and that the server runs."

if [ "$status" != 200 ]; then
  message=$(grep -oE '"error": *"([^"\\]|\\.)*"' "$work/answer" | head -n 1 |
    sed -e 's/^"error": *"//' -e 's/"$//' -e 's/\\n */ /g' -e 's/\\\(["\\/]\)/\1/g') || true
  fail "$status: ${message:-$(head -c 300 "$work/answer" 2> /dev/null || true)}"
fi
# `data` comes first in the answer and holds the first image.
grep -oE '"data": *"[A-Za-z0-9+/=]+"' "$work/answer" | head -n 1 | cut -d '"' -f 4 > "$work/data" || true
[ -s "$work/data" ] || fail "The answer holds no image. Check that MODEL_URL is a Preheat model."
base64 --decode < "$work/data" > "$part" || fail "The image in the answer is not base64."
mv "$part" "$out"
echo "$out"
