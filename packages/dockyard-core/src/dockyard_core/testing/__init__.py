"""Contract suites and builders for tests of Dockyard and of third-party backends."""
