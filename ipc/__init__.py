"""The wire between rtcached and its clients. Knows nothing of models, caches or devices."""
