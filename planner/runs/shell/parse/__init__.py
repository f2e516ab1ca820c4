"""Parser of shell scripts: from text whose pieces know their origins to a syntax tree."""
