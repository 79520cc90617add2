"""Raw text as documents: files, formats, cleaning; nothing in here needs torch."""
