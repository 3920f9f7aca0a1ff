"""Model names -> verified local files."""

from caudal.store.store import CatalogEntry, Store, StoredModel, catalog, default_model

__all__ = ["CatalogEntry", "Store", "StoredModel", "catalog", "default_model"]
