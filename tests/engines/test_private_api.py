"""What is not public in Flower and Ray is there, and does what we need; a failure names the function to mend."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import sys
import tempfile
import time
import types
import typing
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedfm.core.wire import codec
from fedfm.engines.flower import loopback_keys, operator_home, private_api, private_programs, private_ray
from fedfm.errors import RunError

ROOT = Path(__file__).parents[2]
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.clientapp.mod", "flwr.serverapp", "flwr.serverapp.strategy"}
PUBLIC |= {"flwr.simulation", "ray", "ray.util.scheduling_strategies"}
MODULES = (private_api, private_programs, private_ray)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's own


@dataclass(frozen=True)
class Check:
    """One thing that is not public: where it is, who uses it, what it has to do."""

    function: str  # of one of MODULES
    paths: tuple[str, ...]
    does: Callable[..., None]

    @property
    def name(self) -> str:
        return self.does.__name__

    @property
    def failure_text(self) -> str:
        """How a failure begins."""
        package = self.paths[0].partition(".")[0]
        module = next(module for module in MODULES if hasattr(module, self.function.partition(".")[0]))
        return f"{module.__name__.rpartition('.')[2]}.{self.function} needs work for {package} {version(package)}"

    def run(self) -> None:
        """Fail with the name of the function that needs work."""
        try:
            self.does(*map(found, self.paths))
        except Exception as error:
            pytest.fail(
                f"{self.failure_text} (Flower's tested versions: {private_api.TESTED}); this does not hold: "
                f"{self.name.replace('_', ' ')}. {type(error).__name__}: {error}"
            )


def found(path: str) -> Any:
    """A module's attribute, or a module."""
    home, _, name = path.rpartition(".")
    module = importlib.import_module(home)
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(path)


CHECKS: list[Check] = []


def needs(function: str, *paths: str) -> Callable[[Callable[..., None]], None]:
    def add(does: Callable[..., None]) -> None:
        CHECKS.append(Check(function, paths, does))

    return add


def takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The call fits the signature."""
    inspect.signature(function).bind(*args, **kwargs)


# --- one check a thing -----------------------------------------------------------------------------------------------


@needs(
    "round_trip",
    "flwr.supercore.inflatable.inflatable_object.get_all_nested_objects",
    "flwr.supercore.inflatable.inflatable_object.no_object_id_recompute",
    "flwr.supercore.inflatable.inflatable_utils.inflate_object_from_contents",
)
def a_record_is_cut_into_objects_and_put_together_again(nested: Any, frozen: Any, inflate: Any) -> None:
    record = codec.to_record({"n": [1, 2.5, "x"], "t": torch.arange(3)})
    back = private_api.round_trip(record)
    assert isinstance(back, RecordDict)
    assert back is not record
    value = codec.from_record(back, None)
    assert (value["n"], value["t"].tolist()) == ([1, 2.5, "x"], [0, 1, 2])
    with frozen():
        objects = nested(record)
    assert record.object_id in objects
    assert len(objects) == 5  # the record, two records in it, the array and its one chunk


@needs("identity", "flwr.supercore.task_identity.TaskIdentity")
def a_message_asks_for_the_identity_of_its_process(identity: Any) -> None:
    before = (identity._task_id, identity._run_id, identity._node_id)
    with private_api.identity(7):
        message = Message(RecordDict({"c": ConfigRecord({"k": 1})}), 5, "query.x", ttl=60.0, group_id="2")
        assert (message.metadata.run_id, message.metadata.src_node_id) == (7, private_api.SUPERLINK)
    assert (identity._task_id, identity._run_id, identity._node_id) == before


@needs(
    "simulate",
    "flwr.simulation.run_simulation",
    "flwr.server.superlink.fleet.vce.backend.raybackend.BasicActorPool",
    "ray.actor.ActorHandle",
)
def a_simulation_takes_apps_from_memory_and_resources_for_ray_and_another_pool(
    simulation: Any, pool: Any, actor: Any
) -> None:
    from fedfm.engines.flower.actor_pool import ActorPool

    used = {name for name in vars(pool) if not name.startswith("_")} | {"actors_capacity", "num_actors"}
    source = inspect.getsource(
        inspect.getmodule(found("flwr.server.superlink.fleet.vce.backend.raybackend.RayBackend"))
    )
    assert all(hasattr(ActorPool, name) or f"self.{name}" in inspect.getsource(ActorPool) for name in used)
    assert "BasicActorPool(\n                actor_type=" in source
    assert "__ray_call__" in inspect.getsource(inspect.getmodule(actor))
    takes(simulation, ServerApp(), ClientApp(), 2, backend_config={"client_resources": {"num_cpus": 1}})
    assert inspect.signature(ClientApp.__call__).parameters.keys() == {"self", "message", "context"}


@needs(
    "simulate",
    "flwr.server.superlink.fleet.vce.backend.raybackend",
)
def a_simulation_takes_the_pool_from_its_module(backend: Any) -> None:
    assert hasattr(backend, "BasicActorPool")


@needs("quiet", "flwr.supercore.logger.FLOWER_LOGGER", "flwr.supercore.logger.log")
def all_messages_of_flower_go_through_one_logger(logger: Any, log: Any) -> None:
    assert log.__self__ is logger
    before = list(logger.handlers)
    with tempfile.TemporaryDirectory() as folder:
        with private_api.quiet(Path(folder) / "log"):
            log(logging.WARNING, "for the file")
        assert "WARNING for the file" in (Path(folder) / "log").read_text()
    assert logger.handlers == before


@needs("is_simulated", "flwr.superlink.grid.InMemoryGrid")
def a_simulation_has_a_grid_of_its_own(grid: Any) -> None:
    assert issubclass(grid, Grid)
    assert private_api.is_simulated(object.__new__(grid))
    assert not private_api.is_simulated(object())


@needs(
    "push_error",
    "flwr.supercore.inflatable.inflatable_utils.ObjectPushError",
    "flwr.supercore.inflatable.inflatable_protobuf_utils.make_push_object_fn_protobuf",
    "flwr.proto.message_pb2.PushObjectResponse",
)
def a_part_of_a_message_that_is_refused_raises(error: Any, pushes: Any, response: Any) -> None:
    assert private_api.push_error() is error
    push = pushes(lambda request: response(stored=False), None, 1, "session")
    with pytest.raises(error):
        push("ab" * 32, b"")


@needs("client_fault", "flwr.common.constant.ErrorCode")
def an_error_reply_says_whether_its_node_is_gone(codes: Any) -> None:
    gone = ("NODE_UNAVAILABLE", "MESSAGE_UNAVAILABLE", "REPLY_MESSAGE_UNAVAILABLE", "CLIENT_APP_CRASHED")
    for name in gone:
        assert private_api.client_fault(Error(getattr(codes, name), "r")).code == "E_DIED"
    for name in ("UNKNOWN", "LOAD_CLIENT_APP_EXCEPTION", "CLIENT_APP_RAISED_EXCEPTION"):
        assert private_api.client_fault(Error(getattr(codes, name), "r")).code == "E_EXCEPTION"
    assert private_api.process_died(Error(codes.CLIENT_APP_CRASHED))
    assert not private_api.process_died(Error(codes.NODE_UNAVAILABLE))
    assert all(private_api.message_lost(Error(getattr(codes, name), "r")) for name in gone[:3])
    assert not private_api.message_lost(Error(codes.CLIENT_APP_CRASHED, "r"))


@needs(
    "Control.__init__",
    "flwr.supercore.control.control_http_client.ControlHttpClient",
    "flwr.supercore.interceptors.RuntimeVersionHttpInterceptor",
)
def an_operator_connects_over_http(client: Any, interceptor: Any) -> None:
    takes(
        client.from_server_address,
        server_address="127.0.0.1:1",
        insecure=False,
        root_certificates=b"",
        interceptors=[interceptor(component_name="fedfm")],
    )
    assert callable(client.close)
    with tempfile.TemporaryDirectory() as folder:
        loopback_keys.write_certificates(Path(folder))
        control = private_api.Control("127.0.0.1:1", Path(folder) / "ca.crt")
        with pytest.raises(RunError, match=r"127\.0\.0\.1:1 cannot be reached"):
            control.online()
        control.close()


def call(client: Any, method: str, request: Any) -> Any:
    """The descriptor of what a call of the operator returns."""
    hints = typing.get_type_hints(getattr(client, method))
    assert hints["request"] is request
    return hints["return"].DESCRIPTOR


_CLIENT = "flwr.supercore.control.control_http_client.ControlHttpClient"


@needs("Control.register", _CLIENT, "flwr.proto.control_pb2.RegisterNodeRequest")
def a_supernode_is_registered_by_its_key(client: Any, request: Any) -> None:
    request(public_key=b"k", name="n")
    assert "node_id" in call(client, "RegisterNode", request).fields_by_name


@needs("Control.online", _CLIENT, "flwr.proto.control_pb2.ListNodesRequest")
def an_operator_sees_which_nodes_are_online(client: Any, request: Any) -> None:
    request()
    nodes = call(client, "ListNodes", request).fields_by_name["nodes_info"].message_type
    assert {"node_id", "status"} <= set(nodes.fields_by_name)
    assert found("flwr.supercore.constant.NodeStatus").ONLINE == "online"


@needs(
    "Control.start",
    _CLIENT,
    "flwr.proto.control_pb2.StartRunRequest",
    "flwr.common.serde.fab_to_proto",
    "flwr.supercore.fab.Fab",
)
def an_operator_starts_a_bundle(client: Any, request: Any, to_proto: Any, fab: Any) -> None:
    sent = request(fab=to_proto(fab("0" * 64, b"content", {})))
    assert (sent.fab.hash_str, sent.fab.content) == ("0" * 64, b"content")
    run_id = call(client, "StartRun", request).fields_by_name["run_id"]
    assert run_id.has_presence


@needs("build", "flwr.cli.build.build_fab_from_disk")
def an_app_folder_becomes_a_bundle(build: Any) -> None:
    takes(build, Path())
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "pyproject.toml"
        project.write_text(
            '[project]\nname = "try"\nversion = "1.0.0"\n[tool.flwr.app]\npublisher = "fedfm"\n'
            '[tool.flwr.app.components]\nserverapp = "fedfm.apps:server"\nclientapp = "fedfm.apps:client"\n'
        )
        content = private_api.build(Path(folder))
    assert "pyproject.toml" in zipfile.ZipFile(BytesIO(content)).namelist()


@needs("Control.status", _CLIENT, "flwr.proto.control_pb2.ListRunsRequest")
def an_operator_asks_how_a_run_is(client: Any, request: Any) -> None:
    assert request(run_id=3).run_id == 3
    runs = call(client, "ListRuns", request).fields_by_name["run_dict"].message_type
    status = runs.fields_by_name["value"].message_type.fields_by_name["status"].message_type
    assert {"status", "sub_status", "details"} <= set(status.fields_by_name)
    assert found("flwr.common.constant.Status").FINISHED == "finished"


@needs("Control.stop", _CLIENT, "flwr.proto.control_pb2.StopRunRequest")
def an_operator_stops_a_run(client: Any, request: Any) -> None:
    assert request(run_id=3).run_id == 3
    call(client, "StopRun", request)


@needs("Control.unregister", _CLIENT, "flwr.proto.control_pb2.UnregisterNodeRequest")
def an_operator_shuts_a_node_out(client: Any, request: Any) -> None:
    assert request(node_id=3).node_id == 3
    call(client, "UnregisterNode", request)


@needs(
    "NodeView.over",
    "flwr.supernode.fleet_http_client.FleetHttpClient",
    "flwr.supernode.node_auth_http_interceptor.NodeAuthHttpInterceptor",
    "flwr.supercore.interceptors.RuntimeVersionHttpInterceptor",
    "flwr.proto.run_pb2.GetRunRequest",
    "flwr.proto.node_pb2.Node",
)
def a_node_asks_whether_a_run_has_ended(client: Any, signs: Any, version_of: Any, request: Any, node: Any) -> None:
    takes(client.from_server_address, "127.0.0.1:1", False, b"", interceptors=[version_of(component_name="SuperNode")])
    takes(signs, "private", "public")
    assert request(node=node(node_id=3), run_id=4).run_id == 4
    call(client, "GetRun", request)
    with tempfile.TemporaryDirectory() as folder:
        loopback_keys.write_certificates(Path(folder))
        loopback_keys.write_node_key(Path(folder) / "node.key")
        view = private_api.NodeView("127.0.0.1:1", Path(folder) / "ca.crt", Path(folder) / "node.key")
        assert view.over(3, 4) is None
        view.close()


@needs(
    "superlink",
    "flwr.superlink.cli.flower_superlink",
    "flwr.common.constant.FLWR_INTERNAL_GRPC_CONTROL_API",
    "flwr.common.constant.FLWR_INTERNAL_GRPC_FLEET_API",
)
def a_superlink_serves_by_uvicorns_own_name_run(program: Any, control: str, fleet: str) -> None:
    takes(program)
    source = inspect.getsource(sys.modules[program.__module__])
    assert source.count("uvicorn.run(") == 1
    assert "import uvicorn\n" in source
    assert "add_insecure_port" not in source
    assert {control, fleet} == {"FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"}


def test_flower_keeps_an_operators_credentials_under_the_names_that_we_write():
    names = [getattr(found("flwr.cli.constant"), f"{name}_STORE_KEY") for name in ("AUTHN_TYPE", "ACCESS_TOKEN")]
    ours = [operator_home.CREDENTIAL.format(address="%s", part=part) for part in ("authn-type", "oidc-access-token")]
    assert names == ours
    assert (
        found("flwr.supercore.credential_store.file_credential_store").CREDENTIAL_FILE_PATH.name == "credentials.yaml"
    )


@needs("supernode", "flwr.supernode.start_client_internal", "flwr.supernode.cli.flower_supernode")
def a_supernode_sleeps_by_its_modules_own_name_time(loop: Any, program: Any) -> None:
    assert isinstance(loop, types.ModuleType)
    assert loop.time is time
    assert "time.sleep(" in inspect.getsource(loop)
    assert inspect.getsource(loop).count(" _push_messages(") == 2  # its definition, and the call after a message
    takes(program)


@needs("forks", "flwr.supernode.main")
def a_supernode_has_a_web_application_that_forks_import_once(module: Any) -> None:
    takes(module.create_app)


@needs(
    "superexec",
    "flwr.supercore.cli.flower_superexec",
    "flwr.supercore.constant.TaskType",
    "flwr.supercore.superexec.executor.LaunchResult",
    "flwr.supercore.superexec.executor.SubprocessExecutor",
    "flwr.supernode.cli.flwr_clientapp",
)
def an_executor_launches_what_a_message_needs(program: Any, kinds: Any, result: Any, executor: Any, _: Any) -> None:
    takes(program)
    assert str(kinds.CLIENT_APP)
    spec = typing.get_type_hints(executor.launch)["spec"]
    takes(executor.launch, executor(), spec)
    used = {"task_type", "runtime_api_address", "token", "insecure", "root_certificates_path", "parent_pid"}
    assert used <= typing.get_type_hints(spec).keys()
    assert isinstance(result.accepted(), typing.get_type_hints(executor.launch)["return"])


@needs("_ask_less_in_silence", "flwr.supercore.superexec.run_superexec")
def an_executor_sleeps_by_its_modules_own_name_time(_: Any) -> None:
    loop = sys.modules["flwr.supercore.superexec.run_superexec"]
    assert loop.time is time
    assert inspect.getsource(loop).count("time.sleep(") == 1


@needs("QUICK_EXECUTOR", "flwr.supercore.superexec.run_superexec._TASK_POLL_INTERVAL_ENV")
def an_executor_reads_from_the_environment_how_often_it_asks(name: str) -> None:
    assert {name} == private_api.QUICK_EXECUTOR.keys()


@needs(
    "_clientapp",
    "flwr.supercore.exit.exit_handler",
    "flwr.supercore.tls.validate_and_resolve_root_certificates",
    "flwr.supernode.runtime.run_clientapp",
)
def a_client_app_unpacks_a_bundle_answers_one_message_and_ends(exit_handler: Any, certificates: Any, _: Any) -> None:
    run = sys.modules["flwr.supernode.runtime.run_clientapp"].run_clientapp
    assert inspect.getsource(run).count("install_from_fab(fab.content, ") == 1
    assert isinstance(exit_handler.registered_exit_handlers, list)
    assert certificates(None, True) is None
    takes(
        run,
        runtime_api_address="127.0.0.1:1",
        token="t",
        insecure=True,
        certificates=None,
        parent_pid=1,
        runtime_dependency_install=False,
    )


@needs("kill_ray", "ray._private.worker")
def ray_knows_the_node_that_it_has_started(worker: Any) -> None:
    assert worker._global_node is None
    takes(found("ray._private.node.Node").kill_all_processes, None, check_alive=False, allow_graceful=False)


@needs("start_ray", "ray.init")
def ray_takes_a_folder_for_its_files(init: Any) -> None:
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    takes(init, address="local", num_cpus=1, num_gpus=0, **quiet, _temp_dir="x")
    assert '"_temp_dir"' in inspect.getsource(inspect.unwrap(init))  # one of its **kwargs


@needs("join_ray", "ray.init")
def ray_takes_an_address_and_an_environment(init: Any) -> None:
    takes(init, address="x:1", log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": {"A": "b"}})


# --- all of them -----------------------------------------------------------------------------------------------------


def of_ray(check: Check) -> bool:
    """Whether the check needs Ray, which also Flower's backend on it imports; `make test` does not install it."""
    return any(path.startswith("ray.") or "raybackend" in path for path in check.paths)


MARKED = [pytest.param(c, id=c.name, marks=[pytest.mark.simulation] if of_ray(c) else []) for c in CHECKS]


@pytest.mark.parametrize("check", MARKED)
def test_private_names_of_flower_and_ray_exist_and_work(check):
    check.run()


@pytest.mark.parametrize("check", MARKED)
def test_a_change_of_it_names_the_function_that_needs_work(check, monkeypatch):
    assert any(hasattr(module, check.function.partition(".")[0]) for module in MODULES)
    for path in check.paths:
        home, _, name = path.rpartition(".")
        found(path)  # imported as a whole, before a part of it goes
        with monkeypatch.context() as changed:
            changed.setitem(sys.modules, path, None)
            changed.delattr(importlib.import_module(home), name)
            with pytest.raises(pytest.fail.Exception) as told:
                check.run()
        assert str(told.value).startswith(check.failure_text)


def imports(file: Path) -> set[str]:
    """What a file imports of Flower and Ray, with dots."""
    text, names = file.read_text(encoding="utf-8"), set()
    if "flwr" not in text and "ray" not in text:
        return names
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.partition(".")[0] in ("flwr", "ray")}


def private(names: set[str]) -> set[str]:
    return {name for name in names if name not in PUBLIC and name.rpartition(".")[0] not in PUBLIC}


@pytest.mark.proof
def test_private_names_are_imported_in_two_modules_and_have_a_check():
    ours = [Path(module.__file__) for module in MODULES]
    assert {name for file in ours for name in private(imports(file))} <= {path for c in CHECKS for path in c.paths}
    files = [
        f for place in ("src", "tests", "benchmarks", "examples", "reproduce") for f in (ROOT / place).rglob("*.py")
    ]
    assert {*ours} <= {*files}
    peers = ("benchmarks/secagg.py", "benchmarks/accountants.py", "tests/privacy/test_composition.py")
    peers += ("tests/engines/test_run_config.py",)  # reads an app as Flower's own command does
    files = [f for f in files if str(f.relative_to(ROOT)) not in peers]  # they measure Flower, and rely on none of it
    assert {str(f.relative_to(ROOT)): p for f in files if f not in ours and (p := private(imports(f)))} == {}


def test_the_installed_flower_is_one_of_those_that_are_tested():
    assert version("flwr").startswith(private_api.TESTED)
