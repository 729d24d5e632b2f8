"""The cache under engines that people already run: one package or file for each, which imports that engine and no other."""
