"""What plugins may build on, by the kind of plugin: the core promises these modules as it promises `components`."""
