"""What importing the package does to a machine: nothing."""

import os
import subprocess
import sys
from pathlib import Path

_SAY = """
import sys
import kvota.model.paged
print("openvino" in sys.modules, "openvino_telemetry" in sys.modules)
"""


def test_openvino_reports_to_nobody_and_leaves_no_id_in_the_home_directory(tmp_path: Path) -> None:
    # CI would silence the reports for a reason of its own.
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    said = subprocess.run(
        [sys.executable, "-c", _SAY],
        env=environment | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["True", "False"], said.stderr
    assert list(tmp_path.iterdir()) == []
