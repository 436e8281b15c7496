"""The engine: synchronous, without HTTP or asyncio."""
