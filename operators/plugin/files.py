"""Serve the static files of a training's page, and no others; they hold no data of any run."""

import os
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from manycpu import pipeline

# The machine's own table may differ: browsers refuse a module whose type is not that of JavaScript.
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOLDERS: Final = {
    "/static": Path(__file__).parent / "static",
    "/page": Path(str(pipeline.__file__)).parent / "page",
}


def files_app() -> FastAPI:
    """Make the app that serves two folders, at the paths by which the page's modules import each other."""
    app = FastAPI(openapi_url=None)
    for path, folder in _FOLDERS.items():
        app.mount(path, _Files(directory=folder))
    return app


class _Files(StaticFiles):
    """Files of the types that a page needs; browsers check each time whether a file has changed."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Serve a file, or 404 if its type is not in the table."""
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
        """Serve a file with its type from the table; browsers must check each time if it has changed."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Content-Type-Options"] = "nosniff"
        if isinstance(response, FileResponse):  # else the browser's copy is current (304)
            response.headers["Content-Type"] = f"{_TYPES[Path(full_path).suffix]}; charset=utf-8"
        return response
