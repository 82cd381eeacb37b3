"""The files that a training's page is made of, and nothing else: they are the same for everybody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from manycpu import pipeline

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import Scope

__all__ = ["files_app"]

# Not as the machine's own tables have it: browsers refuse a module that is no JavaScript.
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOLDERS: Final = {
    "/static": Path(__file__).parent / "static",
    "/page": Path(str(pipeline.__file__)).parent / "page",
}


def files_app() -> FastAPI:
    """Make the app: two folders, below names that the page's modules import each other by."""
    app = FastAPI(openapi_url=None)
    for path, folder in _FOLDERS.items():
        app.mount(path, _Files(directory=folder))
    return app


class _Files(StaticFiles):
    """Files of the types that a page has; a browser asks each time whether they are still the same."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        kind = _TYPES.get(Path(path).suffix)
        if kind is None:
            raise HTTPException(404)
        return await super().get_response(path, scope)

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Content-Type-Options"] = "nosniff"
        if isinstance(response, FileResponse):  # none where the browser has the same
            response.headers["Content-Type"] = f"{_TYPES[Path(full_path).suffix]}; charset=utf-8"
        return response
