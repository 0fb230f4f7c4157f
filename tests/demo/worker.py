"""A worker that repairs small Python programs.

It is provisioned once, says `ready`, and then serves one JSON request on each line of its standard input. Each request
is answered by a line `got OPERATION` at once and a line of JSON when it is done. Blocked in reading its standard input it
is checkpointed; each fork goes on from there with its own input.
"""

import ast
import copy
import difflib
import json
import os
import signal
import socket
import sys
import time
import uuid

import numpy

# Warm: what a worker of this kind would use, from the packages that were unpacked.
import jinja2
import packaging.version
import urllib3
import yaml

SECONDS_FOR_A_TRIAL = 20
# Warm state in memory that every fork must find as it was: 32 MiB of reproducible numbers.
MEMORY = numpy.random.default_rng(2024).integers(0, 256, 32 << 20, dtype=numpy.uint8)
NOTES = "/work/notes"


# --- Rules: each yields (name, changed tree) for every place where it applies -------------------------------------------


def copies(tree, wanted):
    """Deep copies of the tree, one for each node of the wanted type, with that node of the copy."""
    count = sum(isinstance(node, wanted) for node in ast.walk(tree))
    for index in range(count):
        changed = copy.deepcopy(tree)
        yield changed, [node for node in ast.walk(changed) if isinstance(node, wanted)][index]


def replace(tree, old, new):
    """Puts `new` where `old` stands."""
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
                return
            if isinstance(value, list) and any(item is old for item in value):
                value[[item is old for item in value].index(True)] = new
                return


def expression(text, **parts):
    """Parses an expression and puts syntax trees in place of the names given."""
    tree = ast.parse(text, mode="eval")
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.Name) and node.id in parts:
            replace(tree, node, copy.deepcopy(parts[node.id]))
    return tree.body


def assigned_names(node):
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def mutable_default(tree):
    for changed, function in copies(tree, ast.FunctionDef):
        arguments = function.args
        positional = arguments.args[len(arguments.args) - len(arguments.defaults):]
        fresh = []
        for place, (argument, default) in enumerate(zip(positional, list(arguments.defaults))):
            if isinstance(default, (ast.List, ast.Dict, ast.Set, ast.Call)):
                arguments.defaults[place] = ast.Constant(None)
                fresh += ast.parse(f"if {argument.arg} is None: {argument.arg} = {ast.unparse(default)}").body
        if fresh:
            function.body[0:0] = fresh
            yield changed


def iterate_over_a_copy(tree):
    for changed, loop in copies(tree, ast.For):
        if not (isinstance(loop.iter, ast.Call) and getattr(loop.iter.func, "id", "") in ("range", "list")):
            loop.iter = expression("list(it)", it=loop.iter)
            yield changed


def bind_loop_variable(tree):
    for changed, function in copies(tree, ast.Lambda):
        bound = {argument.arg for argument in function.args.args}
        loops = [node for node in ast.walk(changed) if isinstance(node, (ast.For, ast.comprehension))]
        targets = set().union(*[assigned_names(loop.target) for loop in loops]) if loops else set()
        free = {name.id for name in ast.walk(function.body) if isinstance(name, ast.Name)} & targets - bound
        for name in sorted(free):
            function.args.args.append(ast.arg(name))
            function.args.defaults.append(ast.Name(name, ast.Load()))
        if free:
            yield changed


def missing_return(tree):
    for changed, function in copies(tree, ast.FunctionDef):
        names = assigned_names(function)
        if not any(isinstance(node, ast.Return) for node in ast.walk(function)):
            for name in sorted(names):
                function.body.append(ast.Return(ast.Name(name, ast.Load())))
                yield copy.deepcopy(changed)
                function.body.pop()


def missing_branch_return(tree):
    for changed, statement in copies(tree, ast.Expr):
        if isinstance(statement.value, ast.Call):
            replace(changed, statement, ast.Return(statement.value))
            yield changed


def shadowed_variable(tree):
    for changed, loop in copies(tree, (ast.For, ast.comprehension)):
        for name in sorted(assigned_names(loop.target)):
            scope = loop.body if isinstance(loop, ast.For) else []
            for part in [loop.target, *scope]:
                for node in ast.walk(part):
                    if isinstance(node, ast.Name) and node.id == name:
                        node.id = f"inner_{name}"
            yield changed


def copy_the_alias(tree):
    for changed, assignment in copies(tree, ast.Assign):
        if isinstance(assignment.value, (ast.Name, ast.Attribute, ast.Subscript)):
            assignment.value = expression("__import__('copy').deepcopy(it)", it=assignment.value)
            yield changed
    for changed, product in copies(tree, ast.BinOp):
        if isinstance(product.op, ast.Mult) and isinstance(product.left, ast.List):
            inner = ast.ListComp(
                product.left.elts[0],
                [ast.comprehension(ast.Name("_", ast.Store()), expression("range(n)", n=product.right), [], 0)],
            )
            replace(changed, product, inner)
            yield changed


def equal_within_rounding(tree):
    for changed, comparison in copies(tree, ast.Compare):
        if len(comparison.ops) == 1 and isinstance(comparison.ops[0], ast.Eq):
            close = expression("abs(a - b) < 1e-9", a=comparison.left, b=comparison.comparators[0])
            replace(changed, comparison, close)
            yield changed


def compare_each(tree):
    """`x == 1 or 2` becomes `x == 1 or x == 2`."""
    for changed, both in copies(tree, ast.BoolOp):
        first = both.values[0]
        if isinstance(first, ast.Compare) and any(isinstance(value, ast.Constant) for value in both.values[1:]):
            both.values[1:] = [
                ast.Compare(copy.deepcopy(first.left), copy.deepcopy(first.ops), [value])
                if isinstance(value, ast.Constant) else value
                for value in both.values[1:]
            ]
            yield changed


def other_division(tree):
    for changed, division in copies(tree, ast.BinOp):
        if isinstance(division.op, (ast.Div, ast.FloorDiv)):
            division.op = ast.Div() if isinstance(division.op, ast.FloorDiv) else ast.FloorDiv()
            yield changed


def encode_text(tree):
    for changed, call in copies(tree, ast.Call):
        if len(call.args) == 1:
            call.args[0] = expression("it.encode()", it=call.args[0])
            yield changed


def other_comparison(tree):
    swaps = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    for changed, comparison in copies(tree, ast.Compare):
        if type(comparison.ops[0]) in swaps:
            comparison.ops[0] = swaps[type(comparison.ops[0])]()
            yield changed


def one_more_or_less(tree):
    for changed, call in copies(tree, ast.Call):
        if getattr(call.func, "id", "") == "range":
            for operator in (ast.Add(), ast.Sub()):
                end = call.args[min(1, len(call.args) - 1)]
                place = call.args.index(end)
                call.args[place] = ast.BinOp(end, operator, ast.Constant(1))
                yield copy.deepcopy(changed)
                call.args[place] = end
    for changed, constant in copies(tree, ast.Constant):
        if type(constant.value) is int:
            for step in (1, -1):
                constant.value += step
                yield copy.deepcopy(changed)
                constant.value -= step


RULES = [
    mutable_default, iterate_over_a_copy, bind_loop_variable, missing_return, missing_branch_return, shadowed_variable,
    copy_the_alias, equal_within_rounding, compare_each, encode_text, other_division, other_comparison, one_more_or_less,
]


# --- Repair -------------------------------------------------------------------------------------------------------------


class TookTooLong(Exception):
    pass


def on_alarm(_signal, _frame):
    raise TookTooLong(f"ran longer than {SECONDS_FOR_A_TRIAL} s")


def trial(source, assertions):
    """Runs the program and its assertions; None if all hold, else what went wrong."""
    signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(SECONDS_FOR_A_TRIAL)
    try:
        world = {"__name__": "task"}
        exec(compile(source, "task.py", "exec"), world)
        exec(compile(assertions, "assertions.py", "exec"), world)
        return None
    except (Exception, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def candidates(source):
    tree = ast.parse(source)
    seen = {ast.unparse(tree)}
    for rule in RULES:
        for changed in rule(tree):
            text = ast.unparse(ast.fix_missing_locations(changed))
            if text not in seen:
                seen.add(text)
                yield rule.__name__, text


def ask_model(task, failure):
    """Asks whoever holds the other end of stdin and stdout for a repair: the machine has no network of its own."""
    prompt = (
        "Repair this Python program so that the assertions hold. Answer with the whole program and nothing else.\n\n"
        f"{task['source']}\n\n# Assertions:\n{task['assertions']}\n\n# What fails: {failure}\n"
    )
    print(json.dumps({"ask": prompt}), flush=True)
    answer = json.loads(sys.stdin.readline())
    text = answer.get("content")
    if text and "```" in text:
        text = text.split("```")[1].removeprefix("python")
    return text


def repair(task):
    source, assertions = task["source"], task["assertions"]
    failure = trial(source, assertions)
    if failure is None:
        return {"fixed": False, "why": "the assertions hold already"}
    if task.get("model"):
        text = ask_model(task, failure)
        if text and trial(text, assertions) is None:
            return proof(source, text, "model", 1, failure, assertions)
    tried = 0
    for rule, text in candidates(source):
        tried += 1
        if trial(text, assertions) is None:
            return proof(source, text, rule, tried, failure, assertions)
    return {"fixed": False, "why": f"none of {tried} repairs holds", "failed_before": failure}


def proof(source, text, rule, tried, failure, assertions):
    before = ast.unparse(ast.parse(source)).splitlines()
    return {
        "fixed": True,
        "rule": rule,
        "tried": tried,
        "failed_before": failure,
        "assertions": sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(assertions))),
        "diff": [line for line in difflib.unified_diff(before, text.splitlines(), n=0, lineterm="")][2:],
    }


# --- What a fork shows of itself ----------------------------------------------------------------------------------------


def read(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def identity():
    """Only what must differ between forks. The state of `random` is the parent's in every fork, as with fork(2):
    a program that needs its own reseeds from the kernel."""
    return {
        "urandom": os.urandom(16).hex(),
        "uuid": str(uuid.uuid4()),
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "hostname": socket.gethostname(),
        "clock": time.time(),
        "kernel": os.uname().release,
        "fork": read("/run/ramet/fork.json"),
    }


def inspect():
    """What the parent left: its memory and its files."""
    words = MEMORY.view(numpy.uint64)
    return {
        "memory": f"{int(words.sum()):016x}{int(numpy.bitwise_xor.reduce(words)):016x}",
        "notes": {name: read(f"{NOTES}/{name}") for name in sorted(os.listdir(NOTES))} if os.path.isdir(NOTES) else {},
    }


def vandalise():
    """Deletes the work tree and writes all over memory."""
    import shutil

    shutil.rmtree("/work")
    MEMORY[:] = 0xEE
    waste = numpy.full(64 << 20, 0xEE, dtype=numpy.uint8)
    return {"work_exists": os.path.exists("/work"), "memory": int(MEMORY.max()), "waste": int(waste.sum() % 1000)}


OPERATIONS = {"repair": repair, "inspect": lambda _: inspect(), "vandalise": lambda _: vandalise(), "identity": lambda _: {}}


def warm_up():
    """Uses what was imported once, so that no fork pays for first use."""
    numpy.linalg.solve(numpy.eye(8) * 3, numpy.arange(8))
    jinja2.Template("{{ word }}").render(word="warm")
    yaml.safe_load("warm: [1, 2, 3]")
    packaging.version.parse("1.0")
    urllib3.util.parse_url("http://localhost/warm")
    repair({"source": "def last(items):\n    return items[len(items)]\n", "assertions": "assert last([1, 2]) == 2"})
    identity()


def main():
    warm_up()
    print(json.dumps({"ready": inspect()["memory"], "kernel": os.uname().release}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print("got", request["operation"], flush=True)
        answer = OPERATIONS[request["operation"]](request)
        print(json.dumps({**answer, "identity": identity()}), flush=True)
    # Taking the interpreter down would write to every object, that is to most of the memory that a fork shares.
    os._exit(0)


if __name__ == "__main__":
    main()
