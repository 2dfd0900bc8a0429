"""The SASS gate accepts good machine code and rejects every kind of bad one (made-up listings)."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sass_gate.py"


def load_gate():
    spec = importlib.util.spec_from_file_location("sass_gate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sass_gate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


gate = load_gate()
sass = sys.modules["sass_listing"]

LOAD = ["UBLKCP.S.G.MULTICAST", "USETMAXREG.DEALLOC.CTAPOOL"]
NATIVE = ["HGMMA.64x128x16.F32.BF16", "UTMALDG.4D", "USETMAXREG.TRY_ALLOC"]
HALF_EXP2, EXP2 = ["MUFU.EX2.F16"] * 32, ["MUFU.EX2"] * 32


SCORES = "QGMMA.64x128x32.F16.E4M3.E4M3"


def fp8(*value_columns, scores=4):
    products = [f"QGMMA.64x{n}x32.F32.E4M3.E4M3" for n in value_columns]
    return [SCORES, *LOAD, *[SCORES] * (scores - 1), *products, "BAR.SYNC", "STSM.16.M88.4"]


FP8 = fp8(72)
GOOD_OPCODES = {
    "exact": [*FP8, *HALF_EXP2, *HALF_EXP2, "MUFU.EX2"],
    "exact 128": [*fp8(136), *HALF_EXP2],
    "exact 256": [*fp8(128, 136, 64, 40, 32, scores=8), *HALF_EXP2],
    "linear": [*FP8, "MUFU.EX2"],
    "linear 128": fp8(136),
    "linear 256": fp8(136, 40),
    "16-bit": [*NATIVE, *(EXP2 * 2), *["MUFU.EX2"] * 7],
    "16-bit 256": [*NATIVE, *EXP2],
    "backward": [*NATIVE, "UBLKRED.G.S.ADD.F32.RN", "STSM.16.M88.4", "LDSM.16.M88.4", *EXP2],
    "backward causal": [
        *["UBLKRED.G.S.ADD.F32.RN"] * 8,
        *NATIVE,
        "STSM.16.M88.4",
        *EXP2,
        "BRA 0x80",
    ],
    "backward with float8 scores": [
        *["UBLKRED.G.S.ADD.F32.RN"] * 8,
        *NATIVE,
        "QGMMA.64x64x32.F32.E4M3.E4M3",
        "STSM.16.M88.4",
        *EXP2,
        "BRA 0x80",
    ],
    "backward in order": [*NATIVE, *EXP2],
    "backward rows": ["LDG.E", "STG.E"],
    "rotation": ["LDG.E.128", "HMMA.16816.F32.BF16", "STG.E.128"],
    "means": ["LDG.E", "STG.E"],
    "quantize": ["LDG.E", "STG.E.U8"],
    "tile counter": ["STG.E"],
}


def forward(config, arguments):
    return f"_ZN7jax_fa310fwd_kernelINS_{len(config)}{config}I{arguments}EEEEvv{{}}"


EXACT, LINEAR = "NS_3ptx4E4m3ELNS_4Exp2E0E", "NS_3ptx4E4m3ELNS_4Exp2E1E"
# One mangled name per family, as nvcc writes them.
SYMBOLS = {
    "exact": forward("FwdFp8D64", EXACT),
    "exact 128": forward("FwdFp8D128", EXACT),
    "exact 256": forward("FwdFp8D256", EXACT),
    "linear": forward("FwdFp8D64", LINEAR),
    "linear 128": forward("FwdFp8D128", LINEAR),
    "linear 256": forward("FwdFp8D256", LINEAR),
    "16-bit": forward("Fwd16D64", "NS_3ptx4Bf16E"),
    "16-bit 256": forward("Fwd16D256", "NS_3ptx4Bf16E"),
    "backward": "_ZN7jax_fa310bwd_kernelINS_6BwdD64INS_3ptx4Bf16ELb0EEEEEvv{}",
    "backward causal": "_ZN7jax_fa317bwd_causal_kernelINS_7BwdD128INS_3ptx4Bf16ELb0EEEEEvv{}",
    "backward with float8 scores": "_ZN7jax_fa310bwd_kernelINS_13BwdFloat8D128EEEvv{}",
    "backward in order": "_ZN7jax_fa313bwd_dq_kernelINS_6BwdD64INS_3ptx4Bf16ELb1EEEEEvv{}",
    "backward rows": "_ZN7jax_fa315bwd_rows_kernelINS_6BwdD64INS_3ptx4Bf16ELb1EEEEEvv{}",
    "rotation": "_ZN7jax_fa38quantizeILi64ELb0ELb1EEEvNS_14QuantizeParamsENS_12QuantizeGridE{}",
    "means": "_ZN7jax_fa38quantizeILi64ELb0ELb0ELNS_12QuantizeStepE0EEEvv{}",
    "quantize": "_ZN7jax_fa314key_value_statsILi64EEEvNS_14QuantizeParamsE{}",
    "tile counter": "_ZN7jax_fa319tile_counter_kernelEPi{}",
}


def listing(symbol, opcodes, arch="sm_90a"):
    """What `cuobjdump --dump-sass` prints for one kernel."""
    lines = [f"arch = {arch}", "code version = [1,8]", f"\tcode for {arch}", f"\t.target\t{arch}"]
    lines += ["", f"\t\tFunction : {symbol}", '\t.headerflags\t@"EF_CUDA_SM90"']
    for i, opcode in enumerate(opcodes):
        predicate = "@!P0" if i % 2 else "    "
        lines.append(
            f"        /*{16 * i:04x}*/             {predicate} {opcode} R2, R4 ;  /* 0x2 */"
        )
        lines.append(" " * 60 + "/* 0x000fe20000000800 */")
    return "\n".join([*lines, "\t\t.........."])


def extension(changed=None, opcodes=None):
    """A whole good extension as SASS text; the first kernel of family `changed` gets `opcodes`."""
    text = []
    for family, symbol in SYMBOLS.items():
        for i in range(gate.rule_of(sass.Kernel(symbol, symbol)).at_least):
            bad = family == changed and i == 0
            text.append(listing(symbol.format(i), opcodes if bad else GOOD_OPCODES[family]))
    return "\n".join(text)


def failures(text, ptx_files=()):
    kernels, architectures = sass.parse_sass(text)
    found = gate.check_extension(kernels, architectures, ptx_files)
    for kernel in kernels.values():
        found += gate.check_kernel(kernel)
    return found


def report(symbol, registers=168, stores=0, loads=0, advisory=""):
    """What the build keeps of ptxas for one kernel."""
    return (
        f"{advisory}\n"
        "ptxas info    : 0 bytes gmem\n"
        f"ptxas info    : Compiling entry function '{symbol}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {symbol}\n"
        f"    0 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 9 barriers\n"
    )


def test_good_extension_passes():
    assert failures(extension()) == []


def test_parser_counts_predicated_instructions_and_variants():
    opcodes = ["MUFU.EX2", "@P1", "MUFU.EX2.F16", "MUFU.RCP", "LDL.64", "LDLX"]
    kernels, architectures = sass.parse_sass(listing("f", opcodes))
    assert architectures == {"sm_90a"}
    assert kernels["f"].count("MUFU.EX2") == 2
    assert kernels["f"].count("LDL") == 1  # LDLX is another opcode
    assert kernels["f"].count("MUFU") == 3


@pytest.mark.parametrize("family", sorted(f for f in SYMBOLS if f[0] in "el1"))
@pytest.mark.parametrize("position", range(3))  # multiply, load, registers
def test_missing_instruction_fails(family, position):
    good = GOOD_OPCODES[family]
    opcodes = [op for op in good if op != good[position]]
    (failure,) = failures(extension(family, opcodes))
    assert re.search(r"holds no .*, which a kernel of family", failure)


@pytest.mark.parametrize(
    ("family", "product"),
    [
        *(("exact", "64x72x32"), ("linear", "64x72x32"), ("exact 128", "64x136x32")),
        *(("exact 256", "64x136x32"), ("exact 256", "64x40x32"), ("linear 256", "64x40x32")),
    ],
)
def test_lost_column_of_ones_fails(family, product):
    width = int(product.split("x")[1])
    narrow = [op.replace(product, f"64x{width - 8}x32") for op in GOOD_OPCODES[family]]
    (failure,) = failures(extension(family, narrow))
    assert f"holds no QGMMA.{product}.F32" in failure


@pytest.mark.parametrize(
    ("family", "opcode", "change", "got"),
    [
        *(("exact", "MUFU.EX2.F16", n, 64 + n) for n in (-64, -4, 4)),
        *(("16-bit", "MUFU.EX2", n, 71 + n) for n in (-71, -8, 9)),
        *(("16-bit 256", "MUFU.EX2", n, 32 + n) for n in (-1, 16)),
        *((f, "MUFU.EX2", n, 32 + n) for f in ("backward", "backward in order") for n in (-32, 1)),
    ],
)
def test_other_number_of_exponentials_fails(family, opcode, change, got):
    opcodes = list(GOOD_OPCODES[family])
    for _ in range(abs(change)):
        opcodes.append(opcode) if change > 0 else opcodes.remove(opcode)
    (failure,) = failures(extension(family, opcodes))
    assert re.search(rf"must hold \d+ {opcode} for each copy of a step .*; got {got}\.$", failure)


def test_more_copies_of_a_step_pass():
    exact = [*HALF_EXP2, SCORES, SCORES]
    for family, step in (("exact", exact), ("16-bit", EXP2 * 2), ("backward", EXP2)):
        assert failures(extension(family, [*GOOD_OPCODES[family], *step])) == []


@pytest.mark.parametrize("family", ["exact", "exact 128", "exact 256"])
def test_every_score_on_the_special_function_unit_fails(family):
    twice = GOOD_OPCODES[family].count("MUFU.EX2.F16") * ["MUFU.EX2.F16"]
    (failure,) = failures(extension(family, [*GOOD_OPCODES[family], *twice]))
    assert "must hold at most 32 MUFU.EX2.F16 for every " in failure


def test_linear_kernel_with_f16_exponentials_fails():
    (failure,) = failures(extension("linear", [*FP8, "MUFU.EX2.F16"]))
    assert "wrong unit: 1 MUFU.EX2.F16" in failure


@pytest.mark.parametrize("family", ["exact", "linear 128", "exact 256", "16-bit", "16-bit 256"])
@pytest.mark.parametrize("opcode", ["LDSM.16.MT88.4", "MOVM.16.MT88", "STSM.16.MT88.4"])
def test_transposed_values_fail(family, opcode):
    (failure,) = failures(extension(family, [*GOOD_OPCODES[family], opcode]))
    assert "transposes: 1 " in failure


@pytest.mark.parametrize(
    ("family", "opcode"),
    [
        (family, opcode)
        for family in SYMBOLS
        for opcode in ("LDL.LU", "STL.128", "HMMA.16816.F32", "IMMA.16832.S8.S8")
        if family != "rotation" or opcode[:4] != "HMMA"  # which that family must hold
    ],
)
def test_forbidden_instruction_fails(family, opcode):
    (failure,) = failures(extension(family, [*GOOD_OPCODES[family], opcode]))
    assert opcode.split(".")[0] in failure


@pytest.mark.parametrize(
    ("family", "opcode"),
    [
        *(
            ("exact", "HGMMA.64x64x16.F32"),
            ("linear", "HGMMA.64x64x16.F32"),
            ("16-bit", "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ),
        *(
            ("backward in order", "UBLKRED.G.S.ADD.F32.RN"),
            ("backward in order", "RED.E.ADD.F32.FTZ.RN"),
        ),
    ],
)
def test_wrong_unit_fails(family, opcode):
    (failure,) = failures(extension(family, [*GOOD_OPCODES[family], opcode]))
    assert "wrong unit" in failure


def test_loop_between_lines_fails():
    code = GOOD_OPCODES["backward causal"]
    assert failures(extension("backward causal", [*code, "BRA 0x40"])) == []  # a longer one
    assert failures(extension("backward causal", [*code, "BRA 0x90"])) == []  # without products
    (failure,) = failures(extension("backward causal", [*code[:-1], "BRA 0x40"]))
    assert "multiple of 128 bytes; got 0x40" in failure
    (failure,) = failures(extension("backward causal", code[:-1]))
    assert "there is none" in failure


@pytest.mark.parametrize("arch", ["sm_90", "sm_100a"])
def test_other_architecture_fails(arch):
    extra = listing(SYMBOLS["quantize"].format(9), GOOD_OPCODES["quantize"], arch)
    (failure,) = failures(extension() + "\n" + extra)
    assert arch in failure


def test_ptx_fails():
    (failure,) = failures(extension(), ["a.sm_90a.ptx"])
    assert "PTX" in failure


def test_empty_extension_fails_for_every_family():
    found = failures("")
    assert len(found) == 1 + len(gate.RULES)
    assert "got none" in found[0]


def test_missing_family_fails():
    text = "\n".join(t for t in extension().split("\t\t..........") if "Fwd16D64" not in t)
    (failure,) = failures(text)
    assert "at least 4 kernels of family '16-bit 64, 128'; got 0" in failure


def test_unknown_kernel_fails():
    (failure,) = failures(extension() + "\n" + listing("_Z7mystery", ["LDG.E"]))
    assert "no rule covers this kernel" in failure


def test_demangled_names_are_recognised_too():
    name = "void jax_fa3::fwd_kernel<jax_fa3::FwdFp8D64<jax_fa3::ptx::E4m3, (jax_fa3::Exp2)%d> >()"
    assert gate.rule_of(sass.Kernel("?", name % 0)).family == "fp8 exact 64"
    assert gate.rule_of(sass.Kernel("?", name % 1)).family == "fp8 linear 64"


def test_clean_ptxas_report_passes():
    kernels, _ = sass.parse_sass(extension())
    logs = {"a.ptxas.log": "".join(report(symbol) for symbol in kernels)}
    assert gate.check_ptxas(kernels, logs) == []


def test_ptxas_report_is_read_per_kernel():
    entries, advisories = sass.parse_ptxas(report("f", 24) + report("g", 240, 8, 12))
    assert entries == {"f": sass.PtxasEntry(24, 0), "g": sass.PtxasEntry(240, 20)}
    assert advisories == []


@pytest.mark.parametrize(("stores", "loads"), [(4, 0), (0, 4)])
def test_spill_in_report_fails(stores, loads):
    kernels, _ = sass.parse_sass(listing("f", []))
    (failure,) = gate.check_ptxas(kernels, {"a": report("f", 168, stores, loads)})
    assert "ptxas reports 4 bytes of spills" in failure


@pytest.mark.parametrize("code", sass.FATAL_ADVISORIES)
def test_advisory_in_report_fails(code):
    kernels, _ = sass.parse_sass(listing("f", []))
    line = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async are serialized"
    (failure,) = gate.check_ptxas(kernels, {"a.log": report("f", advisory=line)})
    assert failure.startswith("a.log: ")
    assert code in failure


def test_report_of_another_build_fails():
    kernels, _ = sass.parse_sass(listing("f", []))
    (failure,) = gate.check_ptxas(kernels, {"a": report("g")})
    assert "another build" in failure


def test_resource_usage():
    text = "Resource usage:\n Function f:\n  REG:168 STACK:0\n Function g:\n  REG:24 STACK:0\n"
    assert sass.parse_resource_usage(text) == {"f": 168, "g": 24}


def test_same_code_passes_and_each_difference_fails():
    first = sass.parse_code(listing("f", ["MUFU.EX2", "BAR.SYNC"]) + "\n" + listing("g", ["LDG.E"]))
    assert first["f"] == ["MUFU.EX2 R2, R4 ;", "@!P0 BAR.SYNC R2, R4 ;"]
    assert gate.check_same_code(first, first) == []
    changed = {**first, "f": [*first["f"][:-1], "NOP ;"]}
    (failure,) = gate.check_same_code(first, changed)
    assert failure.startswith(
        "f: the two extensions hold other machine code: 2 and 2 instructions, 1 "
    )
    (failure,) = gate.check_same_code(first, {"f": first["f"]})
    assert failure == "g: is in one of the two extensions only."


def test_same_images_are_told_by_their_bytes(tmp_path):
    if shutil.which("objcopy") is None or shutil.which("c++") is None:
        pytest.skip("needs objcopy (binutils) and c++")
    for name, byte in (("a", 1), ("b", 1), ("c", 2), ("none", None)):
        section = '__attribute__((section(".nv_fatbin"), used))' if byte else ""
        source = tmp_path / f"{name}.cc"
        source.write_text(f"int {name}() {{ return 0; }} {section} char image[] = {{{byte or 0}}};")
        library = tmp_path / f"{name}.so"
        subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    a, b, c, none = (tmp_path / f"{name}.so" for name in ("a", "b", "c", "none"))
    assert sass.same_images(a, b)
    assert not sass.same_images(a, c)
    assert not sass.same_images(none, none)  # nothing was compared
    assert a.stat().st_size > 0  # objcopy leaves its input alone


def test_table_shows_registers_spills_and_counts():
    kernels, _ = sass.parse_sass(listing(SYMBOLS["exact"].format(0), GOOD_OPCODES["exact"]))
    (kernel,) = kernels.values()
    kernel.registers = 168
    header, row = gate.table([kernel], {"a": report(kernel.symbol, stores=16)}).splitlines()
    assert header.split()[:4] == ["family", "registers", "spills", "QGMMA"]
    assert row.split()[:9] == ["fp8", "exact", "64", "168", "16", "5", "0", "65", "0"]


def test_missing_file_and_empty_logs_exit_2(tmp_path, capsys):
    assert gate.main([str(tmp_path / "no.so")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_missing_tool_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sass.CannotCheckError, match="pip install nvidia-cuda-noobjdump"):
        sass.find_tool("noobjdump")
