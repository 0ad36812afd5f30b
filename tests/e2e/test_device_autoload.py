"""The `tpu` device is there after ``import torch``, at no cost to those who do not use it."""

from __future__ import annotations


def test_importing_torch_makes_the_device_known(run_python):
    done = run_python(
        """
        import sys
        import torch
        heavy = {"jaxlib", "jax", "tpu_compile.compiler", "tpu_compile.device.registration"} & set(sys.modules)
        assert not heavy, heavy
        assert torch.tpu.device_count() == 1 and torch.device("tpu").type == "tpu"
        import torch.tpu
        from torch.tpu import synchronize
        assert "jaxlib" not in sys.modules
        assert torch.ones(3, device="tpu").tolist() == [1, 1, 1] and "jaxlib" in sys.modules
        """
    )
    assert done.stdout == done.stderr == ""


def test_it_takes_less_than_50_ms_of_the_import(run_python):
    seconds = [
        float(
            run_python(
                """
                import time
                import torch
                from importlib.metadata import entry_points
                start = time.process_time()
                from tpu_compile.device.autoload import load
                load()
                print(time.process_time() - start)
                assert load.enabled
                """,
                {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            ).stdout
        )
        for _ in range(3)
    ]
    assert min(seconds) < 0.05


def test_it_can_be_switched_off_and_on(run_python):
    run_python(
        """
        import torch
        from tpu_compile.device.autoload import load
        assert not load.enabled and load.reason == "TPU_COMPILE_AUTOLOAD=0" and not hasattr(torch, "tpu")
        try:
            torch.ones(1, device="tpu")
        except RuntimeError:
            load.enable()
        assert torch.ones(1, device="tpu").item() == 1
        load.enable()
        """,
        {"TPU_COMPILE_AUTOLOAD": "0"},
    )


def test_it_steps_aside_for_another_backend(run_python):
    run_python(
        """
        import torch
        from tpu_compile.device.autoload import load
        from tpu_compile.errors import TpuCompileError
        torch.utils.rename_privateuse1_backend("other")
        load()
        assert not load.enabled and "'other'" in load.reason
        try:
            load.enable()
        except TpuCompileError as error:
            assert "'other'" in str(error)
        else:
            raise AssertionError("enabled beside another backend")
        """,
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )


def test_it_steps_aside_for_torch_tpu(run_python, tmp_path):
    (tmp_path / "torch_tpu").mkdir()
    (tmp_path / "torch_tpu" / "__init__.py").write_text("")
    run_python(
        """
        import torch
        from tpu_compile.device.autoload import load
        assert not load.enabled and "torch_tpu" in load.reason, load.reason
        """,
        {"PYTHONPATH": str(tmp_path)},
    )


def test_a_malformed_setting_breaks_no_import(run_python):
    run_python(
        """
        import torch
        from tpu_compile.device.autoload import load
        assert not load.enabled and "expected 1 or 0" in load.reason, load.reason
        """,
        {"TPU_COMPILE_AUTOLOAD": "perhaps"},
    )


def test_compiling_for_the_cpu_needs_no_device(run_python):
    run_python(
        """
        import torch
        fn = torch.compile(lambda x: x + 1, backend="tpu", fullgraph=True)
        assert fn(torch.ones(2)).tolist() == [2, 2]
        """,
        {"TPU_COMPILE_AUTOLOAD": "0"},
    )
