"""The picture of recoveries."""

import json
import subprocess
import sys
from xml.etree import ElementTree

from benchmarks.side_by_side import ROOT


def test_the_picture_has_a_bar_for_each_peer_and_a_dot_for_each_kill(tmp_path):
    kills = {"ours": [80.0, 95.0, -3.0], "torchrun": [7000.0, 12000.0]}
    world = {peer: [{"total": each} for each in times] for peer, times in kills.items()}
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    figures.write_text(json.dumps({"worlds": {"4": {"mlp-1m": world}}}))
    command = [sys.executable, "-m", "benchmarks.plot", figures, picture]
    subprocess.run(command, cwd=ROOT, check=True)
    root = ElementTree.parse(picture).getroot()
    tags = [each.tag.rpartition("}")[2] for each in root.iter()]
    assert tags.count("rect") == 2
    assert tags.count("circle") == 5
    words = [each.text for each in root.iter() if each.text]
    assert "80 ms" in words and "9.5 s" in words
