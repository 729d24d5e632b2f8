"""What `deploy/` starts can be started: files parse, command lines are ones that the CLI takes, probes are served."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from stepwell.base.errors import ConfigError
from stepwell.cli import answer_options, doctor, engine_options
from stepwell.cli.main import build_parser

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY, SOURCE = ROOT / "deploy", ROOT / "src" / "stepwell"
PROGRAM = "/opt/stepwell/bin/stepwell"
STOPPING_S = 60  # --drain, and as long again for copies and the store


# ---- reading them ---------------------------------------------------------------------------------


def dockerfile() -> list[tuple[str, str]]:
    """Instructions and what stands behind them."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def last(instruction: str) -> str:
    return [rest for word, rest in dockerfile() if word == instruction][-1]


def compose() -> dict[str, Any]:
    made = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert isinstance(made, dict)
    return made


def servers() -> dict[str, Any]:
    """Services that run the image's own program."""
    return {name: service for name, service in compose()["services"].items() if "entrypoint" not in service}


def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(re.sub(r"\\\n\s*", "", (DEPLOY / "stepwell.service").read_text()))
    return parser


def manifest(kind: str) -> dict[str, Any]:
    found = [each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if each["kind"] == kind]
    assert len(found) == 1
    return dict(found[0])


def container() -> dict[str, Any]:
    (found,) = manifest("StatefulSet")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every `stepwell` in `deploy/`, with what comes behind it."""
    assert json.loads(last("ENTRYPOINT")) == ["stepwell"]
    yield "Dockerfile", json.loads(last("CMD"))
    for name, service in servers().items():
        yield f"compose {name}", service["command"]
    for option in ("ExecStartPre", "ExecStart"):
        program, *arguments = shlex.split(unit()["Service"][option])
        assert program == PROGRAM
        yield f"systemd {option}", arguments
    assert "command" not in container()  # which would stand in place of the image's own
    yield "kubernetes", container()["args"]


# ---- what is said of them -------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "arguments"), list(command_lines()), ids=lambda each: each if isinstance(each, str) else "")
def test_every_command_line_is_one_that_the_program_takes(where: str, arguments: list[str]) -> None:
    args = build_parser().parse_args(arguments)
    if arguments[0] == "serve":
        answer_options.read(args)
        assert args.request_timeout and args.drain == STOPPING_S / 2
    with pytest.raises(ConfigError, match="--no-such-flag"):
        build_parser().parse_args([*arguments, "--no-such-flag"])


def test_who_listens_beyond_the_machine_wants_a_key() -> None:
    for service in servers().values():
        assert "--host=0.0.0.0" in service["command"] and service["environment"]["STEPWELL_API_KEY"].startswith(
            "${STEPWELL_API_KEY:?"
        )
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "--host=0.0.0.0" in container()["args"]
    secrets = {each["name"] for each in container()["env"] if "secretKeyRef" in each["valueFrom"]}
    assert secrets == {"STEPWELL_API_KEY", "STEPWELL_ADMIN_TOKEN"}
    assert unit()["Service"]["EnvironmentFile"] and "--host 127.0.0.1" in unit()["Service"]["ExecStart"]


def test_variables_are_ones_that_the_program_reads() -> None:
    known = {"STEPWELL_API_KEY", "STEPWELL_ADMIN_TOKEN", *engine_options._MOONCAKE_OPTIONS}
    named = {name for service in servers().values() for name in service["environment"]}
    named |= {each["name"] for each in container()["env"]}
    assert named <= known
    assert all(f'"{name}"' in (SOURCE / "cli/serve.py").read_text() for name in known if name.startswith("STEPWELL_"))


def test_two_servers_share_one_mooncake_on_a_network_of_its_own() -> None:
    services = compose()["services"]
    assert services["master"]["networks"] == ["mooncake"] and compose()["networks"]["mooncake"]["internal"] is True
    assert "--rpc_port=50051" in services["master"]["command"] and "ports" not in services["master"]
    assert len(servers()) == 2
    for name, service in servers().items():
        environment = service["environment"]
        assert (environment["MOONCAKE_MASTER"], environment["MOONCAKE_LOCAL_HOSTNAME"]) == ("master:50051", name)
        assert "mooncake" in service["networks"] and "--store=mooncake:" in service["command"]


def test_probes_ask_for_what_the_server_answers() -> None:
    served = set(re.findall(r'@router\.(?:get|api_route)\("(/\w+)"', (SOURCE / "server/app.py").read_text()))
    probes = {name: container()[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",  # which fails while a server stops, when nothing must restart it
    }
    assert {probe["path"] for probe in probes.values()} <= served
    assert {probe["port"] for probe in probes.values()} == {port["name"] for port in container()["ports"]}
    asked = [last("HEALTHCHECK"), *(" ".join(service["healthcheck"]["test"]) for service in servers().values())]
    assert {found[1] for text in asked if (found := re.search(r"127\.0\.0\.1:8000(/\w+)", text))} == {"/health", "/ready"}


def test_a_server_is_given_the_time_that_stopping_takes() -> None:
    pod = manifest("StatefulSet")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > STOPPING_S
    assert int(unit()["Service"]["TimeoutStopSec"]) > STOPPING_S and unit()["Service"]["KillMode"] == "mixed"
    assert all(int(service["stop_grace_period"].removesuffix("s")) > STOPPING_S for service in servers().values())


def test_the_image_is_for_cpus_or_for_cuda_and_runs_as_nobody_special() -> None:
    assert last("ARG") and ("ARG", "DEVICE=cpu") in dockerfile() and last("FROM") == "base-${DEVICE}"
    bases = {rest.split(" AS ")[1] for word, rest in dockerfile() if word == "FROM" and " AS " in rest}
    assert bases == {"base-cpu", "base-cuda"}
    assert last("USER") == "10001" == str(manifest("StatefulSet")["spec"]["template"]["spec"]["securityContext"]["runAsUser"])


def test_extras_that_the_image_installs_are_there() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    there = set(re.findall(r"^(\w+) = \[", text.split("[project.optional-dependencies]")[1].split("[project.scripts]")[0], re.M))
    named = [found[1] for word, rest in dockerfile() if word == "ENV" and (found := re.match(r"EXTRAS=(\S+)", rest))]
    assert len(named) == 2 and all(set(each.split(",")) <= there for each in named)
    assert all(doctor.EXTRAS.keys() <= set(each.split(",")) for each in named), "what the server can do, the image can"


def test_services_and_volumes_of_the_cluster_fit_together() -> None:
    spec = manifest("StatefulSet")["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert manifest("Service")["spec"]["selector"] == labels == spec["selector"]["matchLabels"]
    volumes = {each["name"] for each in spec["template"]["spec"]["volumes"]}
    volumes |= {each["metadata"]["name"] for each in spec["volumeClaimTemplates"]}
    assert {each["name"] for each in container()["volumeMounts"]} == volumes
