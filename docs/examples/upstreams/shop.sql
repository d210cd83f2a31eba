CREATE TABLE products (id integer PRIMARY KEY, name text NOT NULL, category text NOT NULL);
CREATE TABLE orders (
  id integer PRIMARY KEY, product integer NOT NULL REFERENCES products, region text NOT NULL, quantity integer NOT NULL,
  unit_price numeric(10, 2) NOT NULL, ordered_on date NOT NULL
);
INSERT INTO products VALUES
  (1, 'Desk lamp', 'light'), (2, 'Office chair', 'furniture'), (3, 'Standing desk', 'furniture'), (4, 'Bookshelf', 'furniture'), (5, 'Floor lamp', 'light');
-- 600 orders that are the same at every start.
INSERT INTO orders
  SELECT n, 1 + n * 7 % 5, (ARRAY['north', 'south', 'east', 'west'])[1 + n * 3 % 4], 1 + n * n % 4,
    (ARRAY[34.90, 189.00, 449.50, 99.90, 79.95])[1 + n * 7 % 5] - (n % 3) * 2.5, date '2026-01-01' + n % 270
  FROM generate_series(1, 600) AS n;
GRANT SELECT ON products, orders TO reader;
