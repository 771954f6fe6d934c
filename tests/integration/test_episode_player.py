"""The player of recorded episodes in a report, clicked in a real browser from a file."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from run_results import run_config

from rlinf.envs import make_env
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.recorded import read_recording, write_recording
from rlinf.evaluation.recording import record_episodes
from rlinf.models import build_policy
from rlinf.report.compare_folders import compare_folders
from rlinf.report.episode_player import divergence_step
from rlinf.report.run_page import write_report
from rlinf.run_folder import BASELINE_FOLDER, RECORDINGS_FOLDER

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
SIZE = 96


def evaluated(folder: Path, model, env) -> Path:
    result = evaluate_policy(model, env, env.episode_specs("eval")[:4])
    record_episodes(model, env, result, folder / RECORDINGS_FOLDER, 2, SIZE)
    result.to_json(folder / "result.json")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Evaluations of a policy and of one whose weights differ, compared with each other."""
    parent = tmp_path_factory.mktemp("out puts")
    words = "model=mlp env=tabletop env.tasks=[reach,push] env.max_episode_steps=8 model.action_chunks_len=3"
    config = run_config(parent / "unused", *words.split())
    env = make_env(config.env, 4, auto_reset=False)
    torch.manual_seed(0)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}})
    a = evaluated(parent / "a", model, env)
    with torch.no_grad():
        model.policy[-1].bias += 0.2 * torch.randn(len(model.policy[-1].bias))
    b = evaluated(parent / "b#1", model, env)
    compare_folders(a, b, ["conditions"])
    return a, b


WATCH = """
<script>
const seen = [];
function look(name) {
  const section = document.querySelector('.player');
  seen.push({name, step: section.dataset.step, sides: [...section.querySelectorAll('.side')].map(side => ({
    caption: side.querySelector('figcaption').textContent, image: side.querySelector('img').src,
    drawn: side.querySelector('img').naturalWidth, wide: side.querySelector('img').getBoundingClientRect().width,
    ahead: side.querySelector('.ahead')?.getAttribute('points'), passed: side.querySelector('.passed')?.getAttribute('points'),
    bars: side.querySelectorAll('.bars rect').length, numbers: side.querySelector('.numbers').textContent})),
    cursors: [...section.querySelectorAll('.cursor')].map(line => Number(line.getAttribute('x1'))),
    note: [...section.querySelectorAll('.shown > .note')].map(note => note.textContent).join(' ')});
}
const wait = ms => new Promise(done => setTimeout(done, ms));
const until = async meets => { for (let i = 0; i < 300 && !meets(); i++) await wait(20); };
const player = document.querySelector('.player'), images = () => [...player.querySelectorAll('img')];
const shows = number => until(() => player.dataset.shown === String(number) && images().every(image => image.naturalWidth));
const press = key => player.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
(async () => {
  await shows(0); look('opened');
  player.querySelectorAll('.episodes button')[1].click(); await shows(1); look('clicked');
  press('ArrowRight'); press('ArrowRight'); look('two on');
  press('ArrowLeft'); look('one back');
  const slider = player.querySelector('input');
  if (slider) { slider.value = slider.max; slider.dispatchEvent(new Event('input')); }
  look('end');
  press(' '); press(' '); look('paused'); press(' '); await until(() => slider && player.dataset.step === slider.max); look('played');
  player.querySelectorAll('[aria-label="go to where they diverge"]').forEach(button => button.click()); look('divergence');
  document.body.innerHTML = '<pre id="seen"></pre>'; document.getElementById('seen').textContent = JSON.stringify(seen);
})();
</script>
"""


def watched(page: Path, profile: Path) -> dict[str, dict]:
    """What a reader sees after each click and key, by its name."""
    copy = page.with_name("watched.html")
    copy.write_text(page.read_text(encoding="utf-8") + WATCH, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    flags += [f"--user-data-dir={profile}", "--virtual-time-budget=60000", "--window-size=1280,900"]
    result = subprocess.run([CHROMIUM, *flags, copy.as_uri()], capture_output=True, text=True, timeout=300)
    text = re.search('<pre id="seen">(.*?)</pre>', result.stdout, re.DOTALL)
    assert text, result.stderr[-2000:]
    plain = text[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    return {one["name"]: one for one in json.loads(plain)}


def numbers_of(points: str) -> np.ndarray:
    return np.array([[float(x) for x in point.split(",")] for point in points.split()])


def recording(folder: Path, number: int, place: str = RECORDINGS_FOLDER) -> dict:
    return read_recording(sorted((folder / place).glob("*.js"))[number])


@NEEDS_CHROMIUM
def test_a_click_shows_both_policies_and_keys_go_through_the_steps(folders, tmp_path):
    a, b = folders
    seen = watched(b / "report.html", tmp_path)
    pair = [recording(a, 1), recording(b, 1)]
    opened, clicked = (seen[name]["sides"] for name in ("opened", "clicked"))
    assert len(opened) == 2 and opened != clicked, "control: the first episode"
    assert seen["clicked"]["step"] == "0" and seen["two on"]["step"] == "2" and seen["one back"]["step"] == "1"
    assert all(side["drawn"] == SIZE and side["wide"] > 150 for side in clicked), "images are shown"
    for side, one, name in zip(seen["two on"]["sides"], pair, "ab", strict=True):
        call = one["calls"][0]
        assert side["caption"].startswith(f"{name}: ") and side["image"] == one["frames"][2]
        np.testing.assert_allclose(numbers_of(side["ahead"]), call["path"][2:], atol=0.006)
        np.testing.assert_allclose(numbers_of(side["passed"]), call["path"][:3], atol=0.006)
        assert side["bars"] == 6 and f"value {call['value']:#.3g}" in side["numbers"]
        assert f"reward {one['rewards'][1]:#.3g}" in side["numbers"] or abs(one["rewards"][1]) < 1e-3
    assert clicked[0]["image"] == clicked[1]["image"], "one episode, one first image"
    assert seen["end"]["sides"][0]["image"] == pair[0]["frames"][-1] and seen["end"]["step"] == "8"
    assert seen["paused"]["step"] == "0" and seen["played"]["step"] == "8"
    assert "action" not in seen["played"]["sides"][0]["numbers"]
    assert seen["divergence"]["step"] == str(divergence_step(*pair)), "the button goes to where they part"
    at_0, at_2, at_8 = (seen[name]["cursors"] for name in ("clicked", "two on", "end"))
    assert len(at_0) == 3 and np.allclose(np.subtract(at_2, at_0) * 4, np.subtract(at_8, at_0)) and at_8 > at_0


@NEEDS_CHROMIUM
def test_one_policy_alone_and_a_recording_that_is_missing(folders, tmp_path):
    """The control: without the file, the page says so and draws nothing."""
    moved = shutil.copytree(folders[0], tmp_path / "moved")
    page = write_report(moved)
    (sorted((moved / RECORDINGS_FOLDER).glob("*.js"))[1]).unlink()
    seen = watched(page, tmp_path / "profile")
    assert [side["caption"] for side in seen["opened"]["sides"]] == ["evaluationfailure"]
    assert seen["opened"]["sides"][0]["image"] == recording(folders[0], 0)["frames"][0]
    assert seen["clicked"]["sides"] == [] and "cannot be read" in seen["clicked"]["note"]


def test_the_page_is_small_and_asks_nobody_for_anything(folders):
    text = (folders[1] / "report.html").read_text(encoding="utf-8")
    assert len(text) < 100_000 and "data:image" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|fetch\(|import\(", text)
    sources = re.findall(r'"source": "([^"]+)"', text)
    assert len(sources) == 8 and {source.split("/")[0] for source in sources} == {RECORDINGS_FOLDER, BASELINE_FOLDER}


def test_a_task_cannot_end_the_script_and_pages_without_recordings_have_none(folders, tmp_path):
    moved = shutil.copytree(folders[0], tmp_path / "moved")
    for path in (moved / RECORDINGS_FOLDER).glob("*.js"):
        path.write_text(path.read_text().replace('"instruction": "', '"instruction": "</script><b>'))
    text = write_report(moved).read_text(encoding="utf-8")
    assert text.count("</script>") == 1 and "<b>reach" not in text and "\\u003c/script>" in text
    shutil.rmtree(moved / RECORDINGS_FOLDER)
    assert "<script" not in write_report(moved).read_text(encoding="utf-8")


def test_a_bad_recording_is_left_out_with_a_note(folders, tmp_path):
    moved = shutil.copytree(folders[0], tmp_path / "moved")
    paths = sorted((moved / RECORDINGS_FOLDER).glob("*.js"))
    write_recording(paths[0], {"spec": {}})
    text = write_report(moved).read_text(encoding="utf-8")
    assert text.count("Left out: ") == 1 and f"{paths[0].name} is not a recorded episode" in text
    assert text.count('"source": ') == len(paths) - 1, "the others are shown"
    for path in paths[1:]:
        write_recording(path, {"spec": {}})
    text = write_report(moved).read_text(encoding="utf-8")
    assert text.count("Left out: ") == len(paths) and "<script" not in text


def test_first_pictures_of_other_sizes_are_not_compared(folders, tmp_path):
    moved = shutil.copytree(folders[1], tmp_path / "moved")
    path = sorted((moved / RECORDINGS_FOLDER).glob("*.js"))[0]
    write_recording(path, read_recording(path) | {"size": SIZE + 1})
    text = write_report(moved).read_text(encoding="utf-8")
    assert text.count('"same_start": null') == 1 and text.count('"same_start": true') == 3
