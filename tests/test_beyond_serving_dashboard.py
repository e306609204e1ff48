"""The Grafana dashboard against a real Prometheus that reads a real server under load: every question has an answer."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import ask, engine, get, httpx, served, wait_until

if not (shutil.which("prometheus") and shutil.which("promtool")):
    pytest.skip("Prometheus is not installed: apt-get install prometheus", allow_module_level=True)
pytestmark = pytest.mark.slow

DASHBOARD = json.loads((Path(__file__).parents[1] / "beyond/serving/grafana.json").read_text(encoding="utf-8"))
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs: [{{job_name: engine, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


llm = engine(max_num_seqs=2, num_kvcache_blocks=24, kvcache_block_size=8)
server = served()


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory):
    """A client of a Prometheus that reads the server, which answers one request after another meanwhile."""
    folder, enough = tmp_path_factory.mktemp("prometheus"), threading.Event()
    (folder / "prometheus.yml").write_text(CONFIG.format(port=server.port))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address={address}", "--log.level=error"]

    def keep_asking() -> None:
        while not enough.is_set():
            assert ask(server, prompt=[7] * 40, max_tokens=60, ignore_eos=True, n=3).status_code == 200  # over the pool

    with ThreadPoolExecutor(1) as pool, subprocess.Popen(command) as process:
        load = pool.submit(keep_asking)
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1", timeout=60) as client:
                yield client
        finally:
            enough.set()
            process.kill()
        load.result(60)


def found(prometheus, path: str, **parameters: str) -> list:
    """What Prometheus finds; nothing while it starts."""
    try:
        response = prometheus.get(path, params=parameters)
    except httpx.ConnectError:
        return []
    if response.status_code == 503:  # it reads its storage
        return []
    answer = response.json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"] if isinstance(answer["data"], dict) else answer["data"]


@pytest.mark.parametrize("expression", [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]])
def test_every_panel_has_data_while_the_server_answers(prometheus, expression):
    filled_in = expression.replace("$model", ".*").replace("$__rate_interval", "1m")
    assert "$" not in filled_in

    def has_data() -> bool:
        series = found(prometheus, "query", query=filled_in)
        return bool(series) and all(math.isfinite(float(each["value"][1])) for each in series)

    wait_until(has_data, seconds=60)


def test_promtool_finds_nothing_wrong_but_vllms_colons(server):
    text = get(server, "/metrics").text
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    complaints = (checked.stdout + checked.stderr).splitlines()
    assert [line for line in complaints if "should not contain ':'" not in line] == []
