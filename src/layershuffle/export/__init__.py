"""ONNX files of a model: what runs its blocks without torch (`layershuffle export`)."""

from layershuffle.export.folder import PRECISIONS, export_model, export_whole

__all__ = ["PRECISIONS", "export_model", "export_whole"]
