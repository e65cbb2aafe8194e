#!PYTHON -IS
"""Stand in for `python`: ask the server for a process, pass signals on to it, and end as it does.

It loads next to nothing, since most of a start is loading.  Options that it does not know are left to Python.
"""

import _socket as socket
import os
import signal
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: list[str]) -> None:
    unbuffered = arguments[:1] == ["-u"]
    command = arguments[unbuffered:]
    if not command or (command[0].startswith("-") and command[0] not in ("-m", "-c")):
        os.execv("PYTHON", ["PYTHON", *arguments])
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if is_inherited(number)]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect("ADDRESS")
    request = repr((command, unbuffered, os.getcwd(), dict(os.environb), files, os.getpid(), os.getppid())).encode()
    handed = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    server.sendmsg([len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handed)])
    server.sendall(request)
    for passed in PASSED_ON:
        if signal.getsignal(passed) != signal.SIG_IGN:
            signal.signal(passed, lambda number, frame: server.send(bytes([number])))
    for number in files:
        os.close(number)  # they are the process's now: who reads from it sees when it is done
    ended = server.recv(4)
    status = int.from_bytes(ended, "big", signed=True) if ended else 1
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # the folder that was listed, which is closed again
        return False


main(sys.argv[1:])
