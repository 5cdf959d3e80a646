import dataclasses
from pathlib import Path

import pytest

from entwine_jax import configuration
from entwine_jax.configuration import Configuration, from_environment


def test_defaults():
    assert from_environment({}) == Configuration(False, 10.0, 512, "", False)
    assert Configuration().workspace_bytes == 512 * 2**20


def test_every_variable():
    environ = {
        "ENTWINE_JAX_DISABLE": "1",
        "ENTWINE_JAX_DEADLINE_SECONDS": "2.5",
        "ENTWINE_JAX_WORKSPACE_MIB": "64",
        "ENTWINE_JAX_MEASURED": "off",
        "ENTWINE_JAX_GRAPHS": "1",
    }
    assert from_environment(environ) == Configuration(True, 2.5, 64, "off", True)


def test_switches_that_are_empty_are_off():
    assert (
        from_environment({"ENTWINE_JAX_DISABLE": "", "ENTWINE_JAX_GRAPHS": ""}) == Configuration()
    )


@pytest.mark.parametrize(("seconds", "mib"), [(1e-3, 1), (1e6, 2**20)])
def test_the_ends_of_a_range_are_in_it(seconds, mib):
    settings = Configuration(deadline_seconds=seconds, workspace_mib=mib)
    assert (settings.deadline_seconds, settings.workspace_mib) == (seconds, mib)


@pytest.mark.parametrize(
    ("variable", "text", "rule"),
    [
        ("ENTWINE_JAX_DISABLE", "yes", "0 or 1"),
        ("ENTWINE_JAX_DEADLINE_SECONDS", "soon", "0.001 to 1e6 seconds"),
        ("ENTWINE_JAX_DEADLINE_SECONDS", "0", "0.001 to 1e6 seconds"),
        ("ENTWINE_JAX_DEADLINE_SECONDS", "nan", "0.001 to 1e6 seconds"),
        ("ENTWINE_JAX_WORKSPACE_MIB", "1.5", "a whole number of MiB"),
        ("ENTWINE_JAX_WORKSPACE_MIB", "-1", "a whole number of MiB"),
    ],
)
def test_message_names_variable_value_and_rule(variable, text, rule):
    with pytest.raises(ValueError, match=f"{variable} must be {rule}.*, but it is '{text}'"):
        from_environment({variable: text})


def test_configure_overrides_the_environment(monkeypatch):
    monkeypatch.setattr(configuration, "_overridden", None)
    before = configuration.current()
    configuration.configure(deadline_seconds=3.0)
    assert configuration.current() == dataclasses.replace(before, deadline_seconds=3.0)


def test_who_watches_is_told_at_once_and_of_every_change(monkeypatch):
    monkeypatch.setattr(configuration, "_overridden", None)
    monkeypatch.setattr(configuration, "_watchers", [])
    told = []
    configuration.watch(told.append)
    configuration.configure(deadline_seconds=3.0)
    assert [settings.deadline_seconds for settings in told] == [10.0, 3.0]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"workspace_mib": 0}, ValueError),
        ({"workspace_mib": 2**44}, ValueError),
        ({"disabled": 1}, TypeError),
        ({"deadline_seconds": "3"}, TypeError),
        ({"deadline_seconds": True}, TypeError),
        ({"deadline_seconds": 1e-4}, ValueError),
        ({"deadline_seconds": float("inf")}, ValueError),
        ({"deadline_seconds": float("nan")}, ValueError),
        ({"workspace_mib": 1.5}, TypeError),
        ({"graphs": None}, TypeError),
        ({"measured": None}, TypeError),
        ({"nope": 1}, TypeError),
    ],
)
def test_configure_rejects(monkeypatch, changes, error):
    monkeypatch.setattr(configuration, "_overridden", None)
    with pytest.raises(error, match=next(iter(changes))):
        configuration.configure(**changes)
    assert configuration._overridden is None


def test_configure_names_the_settings_that_there_are():
    with pytest.raises(TypeError, match=r"^configure: workspace=64: must be one of .*, graphs"):
        configuration.configure(workspace=64)


def test_unknown_variables_are_a_warning(caplog):
    from_environment({"ENTWINE_JAX_DISABLED": "1", "ENTWINE_JAX_DISABLE": "1", "OTHER": "1"})
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("ENTWINE_JAX_DISABLED is not one of ENTWINE_JAX_DISABLE, ")


def test_a_path_names_what_was_measured(monkeypatch):
    monkeypatch.setattr(configuration, "_overridden", None)
    assert configuration.configure(measured=Path("a") / "b").measured == str(Path("a") / "b")
