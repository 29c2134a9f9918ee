"""The parts of `make demo` that decide: sizes and scale factors, verification of answers, the verdict."""

from pathlib import Path

import pytest

from tests.unit.bench.samples import bench_result, bursty_run, record
from tools.bench.records import RequestOutcome
from tools.bench.results import BenchResult, write_result
from tools.bench.traces import Trace, TraceRequest, read_trace
from tools.model.tiny import PRESETS, make_tiny

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

from benchmarks import demo, demo_report, verify_answers  # noqa: E402
from benchmarks import demo_sizing as sizing  # noqa: E402
from tools.bench.sizing import SizingPace, forecast, length_scale_to, peak_output_tokens, size_memory, two_digits  # noqa: E402


def test_the_burst_asks_for_more_than_undropped_memory_can_serve() -> None:
    trace = read_trace(demo.SHIPPED_TRACE)
    time_scale, shorter = sizing.scales(trace, SizingPace(1500.0, 16 / 1500.0), sizing.SHIPPED_SPAN_S)
    peak_per_s = peak_output_tokens(trace.requests, sizing.PEAK_WINDOW_S) / sizing.PEAK_WINDOW_S / time_scale
    assert shorter == 1.0
    assert peak_per_s == pytest.approx(sizing.BURST_LOAD * 1500.0, rel=0.05)


def test_a_long_trace_is_compressed_and_then_its_lengths_are_shortened() -> None:
    steady = [TraceRequest(i * 0.2, 80, 160) for i in range(32_000)]
    burst = [TraceRequest(3000 + i * 0.02, 80, 160) for i in range(2000)]
    trace = Trace(source="x", format="azure", requests=tuple(sorted(steady + burst, key=lambda r: r.arrival_s)))
    pace = SizingPace(1000.0, 0.016)
    time_scale, shorter = sizing.scales(trace, pace, 90.0)
    scaled = trace.scaled(time_scale=time_scale, length_scale=shorter)
    assert 72.0 < scaled.span_s <= 90.0
    peak_per_s = peak_output_tokens(scaled.requests, sizing.PEAK_WINDOW_S) / sizing.PEAK_WINDOW_S
    assert peak_per_s <= 1.3 * sizing.BURST_LOAD * pace.output_tokens_per_s


def test_a_trace_that_is_dense_throughout_leaves_room_on_average() -> None:
    steady = tuple(TraceRequest(i * 0.1, 80, 160) for i in range(600))
    trace = Trace(source="x", format="azure", requests=steady)
    pace = SizingPace(1000.0, 0.016)
    time_scale, shorter = sizing.scales(trace, pace, 900.0)
    mean_per_s = 600 * 160 / (trace.span_s * time_scale)
    assert shorter == 1.0
    assert mean_per_s == pytest.approx(sizing.AVERAGE_LOAD * pace.output_tokens_per_s, rel=0.05)


@pytest.mark.parametrize(("scale", "rounded"), [(0.1567, 0.15), (1.0, 1.0), (0.0099, 0.0099), (0.30001, 0.3)])
def test_factors_are_rounded_down_to_two_digits(scale: float, rounded: float) -> None:
    assert two_digits(scale) == rounded


def test_memory_holds_eight_mean_requests_each_and_more_when_parameters_are_dropped() -> None:
    requests = [TraceRequest(0.0, 60, 100), TraceRequest(1.0, 80, 160)]
    memory = size_memory(
        requests,
        parameter_bytes=50_000_000,
        layer_parameter_bytes=48_000_000,
        kv_bytes_per_token=4096,
        sequences_each=8,
        workers=2,
    )
    assert memory.undropped_tokens == 2 * 8 * 200
    assert memory.device_memory_bytes == 50_000_000 + 8 * 200 * 4096
    assert memory.dropped_tokens == memory.undropped_tokens + 48_000_000 // 4096


def test_demand_is_what_requests_hold_while_they_live() -> None:
    demand = forecast([TraceRequest(0.0, 100, 100), TraceRequest(2.0, 1, 1)], 0.01)
    assert demand.peak_tokens == pytest.approx(200, abs=15)
    assert demand.mean_tokens == pytest.approx(75, abs=10)  # the first lives for one of two seconds


@pytest.mark.parametrize("name", ["answers.csv", "bursty.csv"])
def test_the_shipped_traces_fit_without_cutting(name: str) -> None:
    trace = read_trace(demo.SHIPPED_TRACE.with_name(name))
    max_model_len = PRESETS[demo.PRESET].max_len
    length_scale = length_scale_to(trace, sizing.MEAN_TOKENS)
    assert trace.scaled(length_scale=length_scale, max_total_tokens=max_model_len).clamped_count == 0


def _answers(path: Path, count: int) -> BenchResult:
    """`count` answers that really are those of `transformers`, from its own token-by-token decoding."""
    model = verify_answers.load_reference(path)
    records = []
    for index in range(count):
        prompt = torch.randint(5, 512, (1, 5 + 7 * index), generator=torch.Generator().manual_seed(index))
        out = model.generate(  # pyright: ignore[reportCallIssue] -- of the mixin's types
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=12,
            max_new_tokens=12,
            do_sample=False,
            suppress_tokens=None,
            eos_token_id=-1,
        )
        answer = out[0, prompt.shape[1] :].tolist()
        made = record(index, index, [index + 1.0] * 12, prompt_token_ids=prompt[0].tolist(), output_token_ids=answer)
        records.append(made)
    run = bursty_run()
    run.records = records
    return bench_result(run)


def test_right_answers_pass_and_a_wrong_token_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny("llama", tmp_path / "m")
    result = _answers(path, 6)
    results_path = tmp_path / "r.json"
    arguments = ["--results", str(results_path), "--model", str(path), "--count", "4"]
    write_result(results_path, result)
    assert verify_answers.main(arguments) == 0
    assert capsys.readouterr().out == '{"answers": 4, "tokens": 48, "differing_tokens": 0, "near_ties": 0}\n'
    assert verify_answers.main([*arguments, "--at-least", "5"]) == 1

    answer = result.policies["recompute"].requests[-1].output_token_ids
    assert answer is not None
    answer[-1] = (answer[-1] + 1) % 512
    write_result(results_path, result)
    capsys.readouterr()
    assert verify_answers.main(arguments) == 1
    assert '"differing_tokens": 1' in capsys.readouterr().out


def test_only_what_rounding_decides_is_excused() -> None:
    exact_TV = torch.zeros(3, 8, dtype=torch.float64)
    exact_TV[:, 3], exact_TV[:, 4] = 1.0, 1.0 - 4e-5
    noise_T = torch.tensor([1e-5, 5e-5, 3e-5], dtype=torch.float64)
    assert verify_answers.compare(exact_TV, noise_T, [3, 3, 3]) == (0, 0)
    assert verify_answers.compare(exact_TV, noise_T, [3, 4, 5]) == (1, 1)
    assert verify_answers.compare(exact_TV, noise_T, [4, 4, 4]) == (2, 1)
    assert verify_answers.compare(exact_TV, torch.zeros(3), [3, 4, 3]) == (1, 0)


def test_rounding_is_seen_and_is_no_excuse_in_float64(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "m")
    exact_TV, noise_T = verify_answers.AnswerReference(path, "float32").logits([7, 8, 9], [10, 11])
    assert (exact_TV.shape, exact_TV.dtype) == ((2, 512), torch.float64)
    assert all(0 < noise < 1e-3 for noise in noise_T.tolist())
    again_TV, nothing_T = verify_answers.AnswerReference(path, "float64").logits([7, 8, 9], [10, 11])
    assert torch.equal(again_TV, exact_TV)
    assert not nothing_T.any()


def test_bad_input_of_the_verification_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--results", str(tmp_path / "none.json"), "--model", str(tmp_path)]
    assert verify_answers.main(arguments) == 2
    assert "none.json" in capsys.readouterr().err
    write_result(tmp_path / "r.json", bench_result(bursty_run()))
    assert verify_answers.main(["--results", str(tmp_path / "r.json"), "--model", "x", "--policy", "drop"]) == 2
    assert "has no policy 'drop'" in capsys.readouterr().err


def test_answers_are_chosen_over_the_whole_trace() -> None:
    run = bursty_run()
    for made in run.records:
        made.prompt_token_ids, made.output_token_ids = [1], [2]
    requests = bench_result(run).policies["recompute"].requests
    chosen = verify_answers.choose(requests, 24)
    assert len({r.index for r in chosen}) == 24
    assert all(r.outcome is RequestOutcome.FINISHED for r in chosen)
    assert (chosen[0].index, chosen[-1].index) == (0, 299)
    assert [r.index for r in verify_answers.choose(requests, 2, [10, 299])] == [0, 10, 299]
    assert [r.index for r in verify_answers.choose(requests, 0, [10])] == [10]


def test_the_table_takes_its_place_in_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    write_result(results, bench_result(bursty_run(), "recompute", "drop"))
    begin, end = "<!-- begin demo: written by a program -->", "<!-- end demo -->"
    page.write_text(f"before\n\n{begin}\nold\n{end}\n\nafter\n")
    for _ in range(2):
        assert demo_report.main([str(results), "--quote", str(page)]) == 0
    table = capsys.readouterr().out
    made = page.read_text()
    assert made.startswith(f"before\n\n{begin}\n|  | recompute | drop |\n| --- | ---: | ---: |\n| TTFT p50 |")
    assert made.endswith(f"{end}\n\nafter\n")
    assert "old" not in made
    assert table.count("p99 TTFT 1.0 times better (goal: at least 10)") == 2
    page.write_text("nothing to replace")
    assert demo_report.main([str(results), "--quote", str(page)]) == 2
    assert "has no lines" in capsys.readouterr().err


def test_the_verdict_names_every_problem() -> None:
    run = bursty_run()
    result = bench_result(run)
    assert any("4 requests did not finish" in p for p in demo.judge(result))
    run.records = [r for r in run.records if r.outcome is RequestOutcome.FINISHED]
    plain = bench_result(run).policies["recompute"]
    good = plain.model_copy(update={"verified_count": 24, "token_mismatches": 0})
    finished = bench_result(run).model_copy(update={"policies": {"recompute": plain, "drop": good}})
    assert demo.judge(finished) == []
    bad = good.model_copy(update={"token_mismatches": 2, "verified_count": 19})
    problems = demo.judge(
        finished.model_copy(update={"complete": False, "policies": {"recompute": plain, "drop": bad}})
    )
    assert problems == [
        "interrupted",
        "only 19 answers could be verified",
        "drop: 2 tokens differ from those of transformers",
    ]


def test_answers_of_two_runs_are_compared_one_by_one() -> None:
    run = bursty_run()
    for made in run.records:
        made.prompt_token_ids, made.output_token_ids = [1], [2]
    one = bench_result(run).policies["recompute"]
    assert demo_report.differing_answers(one, one) == ([], 296)
    run.records[0].output_token_ids = [3]
    assert demo_report.differing_answers(one, bench_result(run).policies["recompute"]) == ([0], 296)


def test_ctrl_c_ends_it_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo", interrupted)
    assert demo.main([]) == 130
    assert capsys.readouterr().out.count("\n") == 1
