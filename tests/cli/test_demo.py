"""`layershuffle demo` serves its page, and Ctrl-C ends it."""

import signal
import subprocess
import sys

import httpx


def test_the_demo_serves_its_page_until_ctrl_c():
    words = ["-m", "layershuffle", "demo", "--port", "0", "--no-browser"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as demo:
        try:
            address = demo.stdout.readline().split()[4]
            # Before torch is imported, which the second question waits for.
            assert "<title>LayerShuffle</title>" in httpx.get(address, timeout=60).text
            facts = httpx.get(f"{address}/page/facts", timeout=120).json()
            assert (facts["depth"], list(facts["models"])) == (12, ["ours", "ordinary"])
        finally:
            demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0


def test_the_demo_needs_the_web_server_alone():
    """Ray and scikit-learn, of the same extra, take seconds to import."""
    code = (
        "import sys, layershuffle.swarm.server.run, layershuffle.swarm.server.page;"
        "light = {'torch'} & set(sys.modules);"
        "import layershuffle.swarm.server.workbench;"
        "sys.exit(str(light | {'ray', 'sklearn', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"
