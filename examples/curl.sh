#!/bin/sh
# The OpenAI-compatible HTTP API with curl: models, a completion, a chat as server-sent events, an error.
#
#   ballast up               # in another terminal
#   sh examples/curl.sh
#
# OPENAI_BASE_URL: URL of the gateway (default: http://127.0.0.1:8000/v1). OPENAI_API_KEY: token, if one is required.
set -eu
url="${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}"
ask() { curl --silent --show-error --no-buffer -H "authorization: Bearer ${OPENAI_API_KEY:-unused}" "$@"; echo; }

ask "$url/models"
model="$(ask "$url/models" | sed 's/.*"id": *"\([^"]*\)".*/\1/')"
ask "$url/completions" -d "{\"model\": \"$model\", \"prompt\": \"A ship\", \"max_tokens\": 8, \"seed\": 7}"
ask "$url/chat/completions" -d "{\"model\": \"$model\", \"stream\": true, \"max_tokens\": 8,
  \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}"
ask "$url/completions" -d "{\"model\": \"$model\", \"prompt\": \"A ship\", \"temperature\": -1}"
