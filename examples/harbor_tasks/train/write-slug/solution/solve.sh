#!/bin/bash
cat > /app/slug <<'END'
#!/bin/sh
printf %s "$1" | tr '[:upper:]' '[:lower:]' | sed 's/[^a-z0-9][^a-z0-9]*/-/g; s/^-//; s/-$//'
END
chmod +x /app/slug
