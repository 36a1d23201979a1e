"""ONNX files of a model: what runs its blocks without torch (`layershuffle export`)."""

from layershuffle.export.folder import export_model, export_whole

__all__ = ["export_model", "export_whole"]
