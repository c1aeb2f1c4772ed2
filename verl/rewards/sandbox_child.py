"""The child side of sandbox.py, run as a script by a bare interpreter; standard library only.

It reads one JSON specification from the descriptor in argv[1], walls itself in, says "ready" on the descriptor in
argv[2], and then runs untrusted code in one of three modes: program (stdin to stdout), serve (answers calls of the
code's functions), test (trusted tests that reach those functions through the serving process, as data only).
"""

import builtins
import ctypes
import json
import os
import resource
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
SYS_MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD, ATTR_RDONLY, ATTR_NOSUID = 442, 0x8000, -100, 1, 2  # same on all 64-bit Linux
PDEATHSIG, CAPBSET_DROP, NO_NEW_PRIVS, SET_DUMPABLE = 1, 24, 38, 4
libc = ctypes.CDLL(None, use_errno=True)


def must(result, what):
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source, target, kind, flags, data=""):
    must(libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None),
         f"mount {source} on {target}")


def read_only(path):
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    must(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, 32), f"make {path} read-only")


def enter_namespaces(uid, gid):
    """New user, mount, network, process, IPC and host-name spaces; returns in the first process of them."""
    must(libc.unshare(NEWUSER | NEWNS | NEWNET | NEWPID | NEWIPC | NEWUTS), "unshare (user namespaces)")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    child = os.fork()
    if child:
        for fd in range(3, 64):
            try:
                os.close(fd)
            except OSError:
                pass
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0x7F)
    libc.prctl(PDEATHSIG, 9)


def change_root(root, visible):
    """A root of our own: what `visible` names (read-only), an empty /tmp of 64 MB, a few devices, nothing else."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in visible:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
        elif os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
            mount(path, target, "", MS_BIND | MS_REC)
    os.makedirs(root + "/dev")
    for name in ("null", "zero", "urandom"):
        open(f"{root}/dev/{name}", "w").close()
        mount(f"/dev/{name}", f"{root}/dev/{name}", "", MS_BIND)
    os.makedirs(root + "/proc")
    try:
        mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
    except OSError:
        pass  # a container that masks parts of /proc forbids a new one; then there is none inside
    os.makedirs(root + "/old")
    os.makedirs(root + "/tmp")
    must(libc.syscall({"x86_64": 155, "aarch64": 41}[os.uname().machine], root.encode(), (root + "/old").encode()), "pivot_root")
    os.chdir("/")
    must(libc.umount2(b"/old", MNT_DETACH), "umount the old root")
    read_only("/")
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=777")


def drop_privileges():
    """No capability now or after any exec, so that nothing above can be undone from inside."""
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    must(libc.capset(header, data), "capset")


def limit(spec):
    def at_most(kind, value):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    at_most(resource.RLIMIT_AS, spec["memory"])
    at_most(resource.RLIMIT_CPU, int(spec["timeout_s"]) + 2)
    at_most(resource.RLIMIT_FSIZE, 64 << 20)
    at_most(resource.RLIMIT_NOFILE, 64)
    at_most(resource.RLIMIT_NPROC, 64 if spec["isolate"] else 4096)
    at_most(resource.RLIMIT_CORE, 0)


# ----------------------------------------------------------------------------------------------- values between walls
class Lines:
    """JSON lines over a pair of descriptors."""

    def __init__(self, read_fd, write_fd):
        self.reader, self.write_fd = os.fdopen(read_fd, "r"), write_fd

    def send(self, message):
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.write_fd, data):]

    def receive(self):
        line = self.reader.readline()
        if not line:
            raise EOFError("the other side is gone")
        return json.loads(line)


def encode(value, refer):
    """A value as tagged JSON; what is no plain data goes through `refer`, which answers with a reference number."""
    for kind in (bool, int, str):
        if type(value) is kind or isinstance(value, kind):
            return [kind.__name__, kind(value)]
    if value is None:
        return ["none", None]
    if isinstance(value, (float, complex)):
        return [float.__name__ if isinstance(value, float) else "complex", repr(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(k, refer), encode(v, refer)] for k, v in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(item, refer) for item in value]]
    return ["ref", refer(value)]


def decode(pair, resolve):
    kind, value = pair
    if kind == "dict":
        return {decode(k, resolve): decode(v, resolve) for k, v in value}
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(decode(item, resolve) for item in value)
    if kind in ("bool", "int", "str", "float", "complex"):
        return getattr(builtins, kind)(value)
    return {"none": lambda: None, "bytes": lambda: bytes.fromhex(value), "ref": lambda: resolve(value)}[kind]()


# ------------------------------------------------------------------------------------------------------------- modes
def run_code(code):
    """Execute the untrusted code as `__main__` and return its namespace, whatever it raises at the end."""
    import types
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "answer.py", "exec"), module.__dict__)
    return module.__dict__


def serve(code, lines):
    """Run the code, then answer calls of what it defined. Everything sent is data; what it prints goes nowhere."""
    objects = []

    def refer(value):
        objects.append(value)
        return len(objects) - 1

    namespace = {}
    try:
        namespace = run_code(code)
    except BaseException as error:
        lines.send(["broken", type(error).__name__, str(error)[:500]])
        return
    lines.send(["names", {n: encode(v, refer) for n, v in list(namespace.items()) if not n.startswith("__")}])
    while True:
        operation, target, arguments, keywords = lines.receive()
        try:
            target = objects[target]
            if operation == "get":
                result = getattr(target, arguments)
            else:
                result = target(*decode(arguments, objects.__getitem__), **decode(keywords, objects.__getitem__))
            lines.send(["value", encode(result, refer)])
        except Exception as error:
            lines.send(["error", type(error).__name__, str(error)[:500]])


def remote_class(lines):
    """Stand-ins for the served objects. They compare by identity: the code's own `__eq__` is never believed."""

    def ask(*request):
        kind, *rest = lines.receive() if lines.send(request) is None else ()
        if kind == "value":
            return decode(rest[0], Remote)
        error = getattr(builtins, str(rest[0]), None)
        raise (error if isinstance(error, type) and issubclass(error, Exception) else RuntimeError)(str(rest[1]))

    class Remote:
        def __init__(self, number):
            self._number = number

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return ask("get", self._number, name, None)

        def __call__(self, *arguments, **keywords):
            return ask("call", self._number, encode(arguments, number), encode(keywords, number))

    def number(value):
        if isinstance(value, Remote):
            return value._number
        raise TypeError(f"a test can pass plain data to the code, not a {type(value).__name__}")

    return Remote


def test(tests, lines, results_fd):
    """Run each test; one that passes answers with its own nonce. Test i is [code, entry point or None, nonce]."""
    kind, *rest = lines.receive()
    if kind != "names":
        return
    Remote = remote_class(lines)
    real = set(dir(builtins))  # the code must not lend the tests an `abs` or a `math` of its own
    names = {str(name): decode(value, Remote) for name, value in rest[0].items() if name not in real}
    names |= {name: __import__(name) for name in names if name in sys.stdlib_module_names}
    for i, (code, entry, nonce) in enumerate(tests):
        try:
            namespace = dict(names, __name__="tests")
            exec(compile(code, f"test_{i}.py", "exec"), namespace)
            if entry is not None:
                namespace["check"](names[entry])
            os.write(results_fd, json.dumps([i, nonce]).encode() + b"\n")
        except EOFError:
            return
        except BaseException:
            continue


def main():
    with os.fdopen(int(sys.argv[1])) as file:
        spec = json.load(file)
    ready_fd = int(sys.argv[2])
    try:
        if spec["isolate"]:
            enter_namespaces(os.getuid(), os.getgid())
            change_root(spec["root"], spec["visible"])
            drop_privileges()
        os.chdir("/tmp" if spec["isolate"] else spec["root"])
        libc.prctl(SET_DUMPABLE, 0)
        limit(spec)
    except Exception as error:
        os.write(ready_fd, f"{type(error).__name__}: {error}".encode()[:500])
        os._exit(98)
    os.write(ready_fd, b"ready")
    os.close(ready_fd)
    sys.argv = ["answer.py"]
    try:
        if spec["mode"] == "program":
            run_code(spec["code"])
        elif spec["mode"] == "serve":
            serve(spec["code"], Lines(*spec["fds"]))
        else:
            test(spec["tests"], Lines(*spec["fds"]), spec["results_fd"])
    except EOFError:
        pass
    sys.stdout.flush()


if __name__ == "__main__":
    main()
