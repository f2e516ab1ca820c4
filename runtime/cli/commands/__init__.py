"""The commands of megaloom: a function for each, called once its options are read."""
