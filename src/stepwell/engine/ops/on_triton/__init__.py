"""Operations of a pass as kernels in Triton's language, and runs of delta nets by a library of such. Importing needs Triton."""
