"""Settings of the documentation site: sphinx-build -W --keep-going -n docs site"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT / "benchmarks")]
sys.path.append(str(ROOT))  # the source tree, where jax_fa3 is not installed

project = "jax_fa3"
author = "the jax_fa3 authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    # docs/_ext
    "docstrings",
    "generated",
    "finished_site",
]
exclude_patterns = ["_ext", "_generated/*.md"]
nitpicky = True
smartquotes_action = "D"  # dashes only: "fp8" is to be typed as it stands
# Every name of ours that is quoted in a docstring must exist; names of others have no index here.
nitpick_ignore_regex = [("py:.*", r"(?!jax_fa3\b).*")]

# ---- pages ----
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

# ---- docstrings ----
default_role = "py:obj"
autodoc_mock_imports = ["flax"]  # jax_fa3.flax imports it; its docstrings do not need it
autodoc_typehints = "none"  # the docstrings give dtypes and shapes
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Transformations", "Numerics", "Source"]

# ---- look: system fonts, nothing from another server ----
html_theme = "furo"
html_title = f"jax_fa3 {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_edit_link": None,
    "light_css_variables": {"color-brand-primary": "#1f5f99", "color-brand-content": "#1f5f99"},
    "dark_css_variables": {"color-brand-primary": "#7fb8ea", "color-brand-content": "#7fb8ea"},
}
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
