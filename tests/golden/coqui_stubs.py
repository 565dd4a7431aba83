"""Import this before anything of `TTS`: stands in for packages that its networks do not need.

Used by the makers of the golden files, in the environment their docstrings describe."""
import importlib.abc
import importlib.machinery
import sys
import types

_STUBS = {"gruut", "gruut_ipa", "pypinyin", "jieba", "g2pkk", "jamo", "bangla", "bnnumerizer", "bnunicodenormalizer", "torchcodec", "spacy",
          "hangul_romanize", "cutlet", "unidic", "umap", "pandas", "mutagen", "gdown", "flask", "nltk",
          "ko_speech_tools", "hangul", "encodec", "einx"}


class _Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__init__": lambda self, *a, **k: None, "__call__": lambda self, *a, **k: None})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in _STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


# Real packages win where they are installed: stubs come last.
sys.meta_path.append(_Finder())

# torchaudio 2.11's native library does not load beside torch 2.13; only its Python functions are needed.
_extension = types.ModuleType("torchaudio._extension")
_extension._IS_TORCHAUDIO_EXT_AVAILABLE = _extension._IS_RIR_AVAILABLE = _extension._IS_ALIGN_AVAILABLE = False
_extension.lazy_import_sox_ext = lambda: None
_extension.fail_if_no_align = _extension.fail_if_no_rir = _extension.fail_if_no_sox = lambda function: function
sys.modules["torchaudio._extension"] = _extension
