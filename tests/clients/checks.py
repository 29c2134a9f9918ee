"""Checks how unmodified third-party clients work with a gateway. Runs in the client's own virtual environment, without
any of Ballast's code: `python checks.py CLIENT URL MODEL_FOLDER` prints one line of JSON per check.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false

import http.server
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

MODEL = "tiny"
ASKED: Any = [{"role": "user", "content": "Describe a ship."}]
BIN = Path(sys.executable).parent
CHECKS: dict[str, list[Callable[[], object]]] = {}
BASE = sys.argv[2] if len(sys.argv) > 2 else ""
FOLDER = sys.argv[3] if len(sys.argv) > 3 else ""


def check(client: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(function: Callable[[], object]) -> Callable[[], object]:
        CHECKS.setdefault(client, []).append(function)
        return function

    return add


def shapes() -> Any:
    """A nested type whose schema has definitions and references."""
    from pydantic import BaseModel, Field

    class Mast(BaseModel):
        height: int = Field(ge=1, le=60)
        sail: Literal["square", "lateen"]

    class Ship(BaseModel):
        kind: Literal["brig", "sloop"]
        masts: list[Mast] = Field(min_length=1, max_length=3)

    # The annotations are strings and the classes are local, so pydantic resolves these names among the globals.
    globals().update(Mast=Mast, Ship=Ship)
    return Ship


# ------------------------------------------------------------------------------------------------ openai


def ai() -> Any:
    from openai import OpenAI

    return OpenAI(base_url=BASE, api_key="any", max_retries=0)


@check("openai")
def chats() -> object:
    answer = ai().chat.completions.create(model=MODEL, messages=ASKED, max_tokens=16, seed=1)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ai().chat.completions.create(model=MODEL, messages=ASKED, max_tokens=16, seed=1, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    return f"{answer.usage.completion_tokens} tokens, the same streamed"


@check("openai")
def parses() -> object:
    parsed = ai().chat.completions.parse(model=MODEL, messages=ASKED, response_format=shapes(), max_tokens=400)
    return parsed.choices[0].message.parsed


@check("openai")
def pydantic_function_tool() -> object:
    from openai import pydantic_function_tool as tool_of

    options: Any = {"tools": [tool_of(shapes())], "tool_choice": "required", "max_tokens": 1500}
    parsed = ai().chat.completions.parse(model=MODEL, messages=ASKED, **options)
    return parsed.choices[0].message.tool_calls[0].function.parsed_arguments


@check("openai")
def responds() -> object:
    with ai().responses.stream(model=MODEL, input="a ship", max_output_tokens=16) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    return f"{kinds[-1]}, {len(set(kinds))} kinds of events"


# ------------------------------------------------------------------------------------------------ anthropic


TOOL: Any = {
    "name": "sail",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"],
        "additionalProperties": False,
    },
}


def claude() -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=BASE.removesuffix("/v1"), api_key="any", max_retries=0)


@check("anthropic")
def messages() -> object:
    options: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 16, "system": "be brief"}
    options["extra_body"] = {"temperature": 0}
    answer = claude().messages.create(**options)
    with claude().messages.stream(**options) as stream:
        for _ in stream.text_stream:
            pass
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in answer.content], (final, answer)
    assert final.usage.output_tokens == answer.usage.output_tokens, (final, answer)
    counted = claude().messages.count_tokens(model=MODEL, messages=ASKED, system="be brief")
    assert counted.input_tokens == answer.usage.input_tokens
    return f"{answer.stop_reason}, the same streamed"


@check("anthropic")
def tool_loop() -> object:
    options: Any = {"model": MODEL, "max_tokens": 1500, "tools": [TOOL], "tool_choice": {"type": "any"}}
    with claude().messages.stream(messages=ASKED, **options) as stream:
        called = stream.get_final_message()
    uses = [block for block in called.content if block.type == "tool_use"]
    assert called.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "done"} for use in uses]
    history = [*ASKED, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    after = claude().messages.create(messages=history, model=MODEL, max_tokens=8, tools=[TOOL])
    return f"{uses[0].name}({uses[0].input}), then {after.usage.output_tokens} tokens"


@check("anthropic")
def unknown_model() -> object:
    import anthropic

    try:
        claude().messages.create(model="other", messages=ASKED, max_tokens=1)
    except anthropic.NotFoundError as error:
        return type(error).__name__
    raise AssertionError("no error")


# ------------------------------------------------------------------------------------------------ pydantic-ai


@check("pydantic-ai")
def nested_output() -> object:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="any"))
    agent = Agent(model, output_type=shapes(), retries=0)
    return agent.run_sync("Describe a ship.", model_settings={"max_tokens": 1500}).output


# ------------------------------------------------------------------------------------------------ instructor


def instructed(mode: str) -> object:
    import instructor

    client = instructor.from_openai(ai(), mode=getattr(instructor.Mode, mode))
    return client.chat.completions.create(
        model=MODEL, messages=ASKED, response_model=shapes(), max_tokens=3000, max_retries=0
    )


@check("instructor")
def tools() -> object:
    return instructed("TOOLS")


@check("instructor")
def json_schema() -> object:
    return instructed("JSON_SCHEMA")


# ------------------------------------------------------------------------------------------------ litellm


@check("litellm")
def completes() -> object:
    import litellm

    options: Any = {"messages": ASKED, "api_base": BASE, "api_key": "any", "max_tokens": 16, "seed": 1}
    answer: Any = litellm.completion(f"hosted_vllm/{MODEL}", **options)
    chunks: Any = litellm.completion(f"openai/{MODEL}", stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    return f"{answer.usage.completion_tokens} tokens, the same streamed"


@check("litellm")
def falls_back_where_the_context_is_too_long() -> object:
    import litellm

    options: Any = {"api_base": BASE, "api_key": "any", "max_tokens": 8}
    far = [{"role": "user", "content": "ship " * 20000}]
    try:
        litellm.completion(f"hosted_vllm/{MODEL}", messages=far, **options)
    except litellm.exceptions.ContextWindowExceededError as error:
        return type(error).__name__
    raise AssertionError("no error")


@check("litellm")
def speaks_anthropics_form() -> object:
    import litellm

    answer: Any = litellm.completion(
        f"anthropic/{MODEL}", messages=ASKED, api_base=BASE.removesuffix("/v1"), api_key="any", max_tokens=8
    )
    return f"{answer.usage.completion_tokens} tokens"


# ------------------------------------------------------------------------------------------------ others


@check("langchain-openai")
def chains() -> object:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=BASE, api_key="any", model=MODEL, max_tokens=1500, temperature=0.5)
    calls = model.bind_tools([shapes()], tool_choice="any").invoke("Describe a ship.").tool_calls
    assert calls[0]["name"] == "Ship"
    assert "".join(str(chunk.content) for chunk in model.bind(max_tokens=8).stream("a ship"))
    return model.with_structured_output(shapes(), method="json_schema").invoke("Describe a ship.")


@check("llama-index")
def chats_and_streams() -> object:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL, api_base=BASE, api_key="any", is_chat_model=True, max_tokens=16, context_window=4096, temperature=0
    )
    asked = [ChatMessage(role="user", content="a ship")]
    whole = model.chat(asked).message.content
    assert "".join(part.delta or "" for part in model.stream_chat(asked)) == whole
    return f"{len(whole or '')} characters, the same streamed"


@check("llm")
def command_line() -> object:
    with tempfile.TemporaryDirectory() as folder:
        models = f"- model_id: ship\n  model_name: {MODEL}\n  api_base: {BASE}\n"
        Path(folder, "extra-openai-models.yaml").write_text(models)
        Path(folder, "keys.json").write_text('{"openai": "any"}')
        command = [str(BIN / "llm"), "-m", "ship", "-o", "max_tokens", "12", "a ship"]
        said = subprocess.run(command, env={**os.environ, "LLM_USER_PATH": folder}, capture_output=True, check=False)
        assert said.returncode == 0, said.stderr.decode()[-300:]
        return f"{len(said.stdout.decode().strip())} characters"


@check("lm-eval")
def local_completions() -> object:
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"model={MODEL},base_url={BASE}/completions,tokenizer={FOLDER},tokenizer_backend=huggingface"
        tasks = Path(__file__).parent / "tasks"
        for path in tasks.iterdir():
            Path(folder, path.name).write_text(path.read_text().replace("TASKS", str(tasks)))
        command = [str(BIN / "lm_eval"), "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", "ships_choice,ships_words", "--include_path", folder, "--output_path", f"{folder}/out"]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": folder}
        said = subprocess.run(command, env=environ, capture_output=True, check=False, cwd=folder)
        assert said.returncode == 0, said.stderr.decode()[-600:]
        [path] = Path(folder, "out").rglob("results_*.json")
        results = json.loads(path.read_text())["results"]
        accuracy = results["ships_choice"]["acc,none"]
        perplexity = results["ships_words"]["word_perplexity,none"]
        return f"two tasks: acc {accuracy:.2f}, word_perplexity {perplexity:.3g}"


@check("guidellm")
def benchmarks() -> object:
    with tempfile.TemporaryDirectory() as folder:
        target = f"kind=openai_http,target={BASE.removesuffix('/v1')},model={MODEL}"
        data = "kind=synthetic_text,prompt_tokens=32,output_tokens=8"
        command = [str(BIN / "guidellm"), "run", "--backend", target, "--profile", "kind=synchronous", "--data", data]
        command += ["--tokenizer", f"kind=hf_auto,model={FOLDER}", "--constraint", "kind=max_requests,count=6"]
        command += ["--output", f"kind=json,path={folder}/out.json", "--disable-console"]
        said = subprocess.run(command, capture_output=True, check=False, cwd=folder)
        assert said.returncode == 0, (said.stderr + said.stdout).decode()[-600:]
        [run] = json.loads(Path(folder, "out.json").read_text())["benchmarks"]
        totals = run["metrics"]["request_totals"]
        assert totals["errored"] == 0, totals
        return f"{totals['successful']} of {totals['total']} requests"


@check("aider")
def one_turn() -> object:
    with tempfile.TemporaryDirectory() as folder:
        command = [str(BIN / "aider"), "--model", f"openai/{MODEL}", "--no-git", "--yes-always", "--no-check-update"]
        command += ["--no-show-model-warnings", "--no-analytics", "--message", "Say hello.", "--no-auto-commits"]
        environ = {**os.environ, "OPENAI_API_BASE": BASE, "OPENAI_API_KEY": "any", "HOME": folder, "NO_COLOR": "1"}
        said = subprocess.run(command, env=environ, capture_output=True, check=False, cwd=folder, timeout=120)
        text = said.stdout.decode()
        assert said.returncode == 0, (said.stderr.decode() + text)[-600:]
        found = re.search(r"Tokens: .*", text)
        assert found, text[-600:]
        return found[0]


@check("mini-swe-agent")
def a_task_in_two_turns() -> object:
    """Runs the `mini` command. A regex constrains each answer to a tool call; the model chooses only the ship's
    name.
    """
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat ship.txt"
    command = f"if [ -s ship.txt ]; then {submit}; else echo NAME > ship.txt; fi"
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    said = re.escape(f"<tool_call>\n{call}\n</tool_call>").replace("NAME", "[a-z]{3,8}")
    with tempfile.TemporaryDirectory() as folder:
        given = {"api_base": BASE, "api_key": "any", "extra_body": {"structured_outputs": {"regex": said}}}
        config = {"agent": {"step_limit": 5}, "model": {"model_kwargs": given, "cost_tracking": "ignore_errors"}}
        Path(folder, "ours.yaml").write_text(json.dumps(config))
        run = [str(BIN / "mini"), "-m", f"openai/{MODEL}", "-y", "--exit-immediately", "-t", "Name a ship."]
        run += ["-c", "mini.yaml", "-c", f"{folder}/ours.yaml", "-o", f"{folder}/out.json"]
        environ = {**os.environ, "HOME": folder, "MSWEA_CONFIGURED": "true", "MSWEA_GLOBAL_CONFIG_DIR": folder}
        ran = subprocess.run(run, env=environ, capture_output=True, check=False, cwd=folder, timeout=240)
        assert ran.returncode == 0, (ran.stderr + ran.stdout).decode()[-600:]
        saved = json.loads(Path(folder, "out.json").read_text())
        name = Path(folder, "ship.txt").read_text().strip()
    roles = [message["role"] for message in saved["messages"]]
    assert roles.count("tool") >= 1, roles
    assert saved["info"]["exit_status"] == "Submitted", saved["info"]
    assert saved["info"]["submission"].strip() == name, saved["info"]
    return f"{roles.count('assistant')} calls of its tool, submitted {name!r}"


@check("curl")
def upgrade_to_http2() -> object:
    body = json.dumps({"model": MODEL, "messages": ASKED, "max_tokens": 4})
    command = ["curl", "-s", "--http2", "-o", os.devnull, "-w", "%{http_code}", "-H", "content-type: application/json"]
    said = subprocess.run([*command, "-d", body, f"{BASE}/chat/completions"], capture_output=True, check=True)
    assert said.stdout == b"200", said.stdout
    return "200 with --http2"


PAGE = """<!doctype html><title>fetch</title><script>
const asked = { model: %MODEL%, messages: %ASKED%, max_tokens: 16, temperature: 0 };
const ask = more => fetch(%BASE% + "/chat/completions", {
  method: "POST",
  headers: { "Content-Type": "application/json", "Authorization": "Bearer any" },
  body: JSON.stringify({ ...asked, ...more }),
});
const say = text => fetch("/", { method: "POST", body: text });
(async () => {
  const whole = (await (await ask({})).json()).choices[0].message.content;
  const answer = await ask({ stream: true }), decoder = new TextDecoder(), reader = answer.body.getReader();
  let text = "", streamed = "";
  for (let part; !(part = await reader.read()).done;) text += decoder.decode(part.value, { stream: true });
  for (const line of text.split("\\n"))
    if (line.startsWith("data: {")) streamed += JSON.parse(line.slice(6)).choices[0]?.delta.content ?? "";
  const id = answer.headers.get("x-request-id") ? "shown" : "hidden";
  say(`${whole && whole === streamed ? "the same" : "something else"} streamed, request id ${id}`);
})().catch(error => say(`failed: ${error}`));
</script>"""


@check("chromium")
def a_page_of_another_origin_fetches() -> object:
    page = PAGE
    for name, value in (("MODEL", MODEL), ("ASKED", ASKED), ("BASE", BASE)):
        page = page.replace(f"%{name}%", json.dumps(value))

    said: queue.Queue[str] = queue.Queue()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(page.encode())

        def do_POST(self) -> None:
            said.put(self.rfile.read(int(self.headers["content-length"])).decode())
            self.answer(b"")

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing, since standard output must contain JSON lines only."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server, tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = ["chromium", "--headless=new", "--disable-gpu", "--no-sandbox", f"--user-data-dir={folder}"]
        browser = subprocess.Popen(
            [*command, f"http://127.0.0.1:{server.server_port}/"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            found = said.get(timeout=120)
        finally:
            browser.terminate()
            browser.wait(30)
            server.shutdown()
    assert found == "the same streamed, request id shown", found
    return f"16 tokens, {found}"


if __name__ == "__main__":
    for each in CHECKS[sys.argv[1]]:
        passed, what = True, ""
        try:
            what = str(each())
        except Exception as error:  # noqa: BLE001 - any exception that a client raises is a result to report
            passed, what = False, f"{type(error).__name__}: {error}"
        print(json.dumps({"check": each.__name__.replace("_", " "), "passed": passed, "what": what[:300]}), flush=True)
