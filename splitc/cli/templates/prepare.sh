py={python}; [ -x "$py" ] || py=python3
dir={folder}; rm -rf "$dir" && mkdir -p "$dir" && tar -xf - -C "$dir" && cd "$dir" || exit 1
"$py" -c '
import socket, sys
from importlib.util import find_spec
if missing := [name for name in ("torch", "splitc") if find_spec(name) is None]:
    sys.exit(f"{{sys.executable}} has no {{chr(44).join(missing)}}; install the same versions as here")
try:
    socket.getaddrinfo(sys.argv[1], None)
except OSError:
    sys.exit(f"{{sys.argv[1]}} has no address here; set MASTER_ADDR to an address of the first host")
' {master}
