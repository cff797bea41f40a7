"""All that knows a model: files, weights, text, arithmetic. OpenVINO appears only here.

Importing OpenVINO imports its model converter, which reports that to Google Analytics, unasked, and
keeps an id for it in the home directory. The converter is of no use here and OpenVINO does without
it, so it cannot be found: a server on somebody's own machines tells nobody that it has started.
"""

import sys

# Here, because it must come before the first `import openvino` of any module below.
sys.modules["openvino.tools.ovc"] = None  # type: ignore[assignment]
