"""A database engine that creates an extension before the first migration, as that of PostGIS does."""
