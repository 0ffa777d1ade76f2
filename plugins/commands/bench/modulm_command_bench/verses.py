"""Text for the `sonnet` dataset, written for this project."""

from __future__ import annotations

__all__ = ["VERSES"]

VERSES = tuple(
    """\
The kettle hums before the house is up
And paints the window with a coat of steam;
The morning pours itself into a cup
And stirs the last loose pieces of a dream.
Below the hill the early trams begin
Their iron singing on the curving rail,
And someone lets the smell of winter in
Along with bread, and yesterday's late mail.
We set the table as we always do,
Two plates, two spoons, the jar with one bent lid;
The light arrives as if the light were new
And shows us every crumb the evening hid.
So small a kingdom, and so much to keep:
A fire, a door, a child still half asleep.
The river keeps no record of the rain
But carries it as if it were its own;
It leaves a little silver on the plain
And rounds the patient corners of a stone.
The heron stands where heron stood before
And reads the water slowly, line by line;
A boat that has forgotten every oar
Drifts past the ruined jetty and the pine.
I came to ask a question of this place
And found the question did not need to stay;
The wind went over it and left no trace
Except a reed that leaned a different way.
What moves will move; what waits will learn to bend;
The river tells one story without end.
They built the clock before they built the square
And hung the hours above an empty field;
The masons climbed on ladders made of air
And taught the stubborn limestone how to yield.
Now traders shout beneath the copper hands,
And lovers meet exactly when it chimes;
A tourist reads the plaque and understands
About a half of it, a dozen times.
But in the tower, where the pigeons nest,
A wheel the size of breakfast turns a wheel,
And neither one has ever asked for rest
Or wondered what the people down there feel.
Each tooth gives way to let another through:
That is the oldest thing that engines do.
My neighbour plants potatoes by the moon
And keeps a ledger of the first swift's flight;
He says that frost is coming, and that soon
The sky will close its door an hour each night.
I do not know how much of it is true,
But all his rows come up in rank and file,
While mine, which I put in as textbooks do,
Consider growing for a good long while.
He leans across the fence and hands me chives
And asks about the book I never write;
We trade, in pieces, most of our two lives
Until the hedge is only shape and night.
There is a science that no school has taught:
To look, and wait, and give away the lot.
""".splitlines()
)
